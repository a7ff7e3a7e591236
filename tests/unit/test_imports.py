"""What each process loads before it needs it: nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("grpc", "httpx", "huggingface_hub", "jinja2", "numpy", "safetensors", "tokenizers", "torch", "transformers")
STUB_MAY = ("numpy",)  # Triton's own utilities import it
HOST_MAY = ("jinja2", "tokenizers")  # it is where texts become tokens


def loaded(code: str) -> list[str]:
    """Which of HEAVY a fresh interpreter has loaded when it has run `code`."""
    probe = f"{code}\nimport sys\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", probe], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()


@pytest.mark.parametrize(
    ("process", "code", "may"),
    [
        ("Triton's stub", "import minisgl_backend.serving.bridge, minisgl_backend.actors.link", STUB_MAY),
        ("the engine's host", "import minisgl_backend.actors.host", HOST_MAY),
        ("the scheduler, and the worker until it builds its runner", "import minisgl_backend.actors.child", ()),
        ("a worker of the fake device", "import minisgl_backend.worker.build, minisgl_backend.worker.fake", ()),
        ("the command line", "from minisgl_client.cli import build_parser; build_parser()", ()),
        (
            "minisgl serve, until its server starts",
            "import os\n"
            "from minisgl_client.cli import build_parser\n"
            "from minisgl_client.commands import serve\n"
            "import minisgl_backend.actors.launch\n"
            "place = serve.default_repository()\n"
            "serve.settings_of(build_parser().parse_args(['serve']), place, {})",
            (),
        ),
    ],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(process: str, code: str, may: tuple[str, ...]) -> None:
    assert set(loaded(code)) <= set(may), process


def test_the_probe_sees_what_is_loaded() -> None:
    assert loaded("import numpy, jinja2") == ["jinja2", "numpy"]
