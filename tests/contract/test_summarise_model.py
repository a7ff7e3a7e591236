"""`model_repository/summarise`: what Triton loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MODEL = Path(__file__).resolve().parents[2] / "model_repository" / "summarise"


def test_importing_the_model_file_loads_nothing_of_ours_and_starting_it_no_model_code() -> None:
    """Triton imports it twice, once only to complete the configuration; its process stays light."""
    code = (
        "import sys, types\n"
        "sys.modules['triton_python_backend_utils'] = types.ModuleType('stub')\n"
        f"exec(compile(open({str(MODEL / '1' / 'model.py')!r}).read(), 'model.py', 'exec'))\n"
        "print([name for name in sys.modules if name.startswith('minisgl') or name in ('numpy', 'zmq')])\n"
        "import minisgl_backend.serving.summarise\n"
        "print([name for name in ('torch', 'transformers', 'tokenizers', 'safetensors', 'zmq') if name in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.split("\n")[:2] == ["[]", "[]"]


def test_the_configuration_declares_what_a_text_needs() -> None:
    text = (MODEL / "config.pbtxt").read_text()
    inputs, outputs = text.split("output [")
    assert [name in inputs for name in ('"text_input"', '"stream"', '"sampling_parameters"')] == [True] * 3
    assert '"text_output"' in outputs and '"finish_reason"' in outputs
    assert inputs.count("name:") == 3 and outputs.count("name:") == 2 and "decoupled: true" in text
