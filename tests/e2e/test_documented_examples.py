"""The Python of README.md, docs/client.md and docs/llm.md does what it says, as it stands there."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from load.serving import Server

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "127.0.0.1:8001"


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


CLIENTS = [(page, code) for page in ("README.md", "docs/client.md") for code in examples(page) if ADDRESS in code]
SCRIPTS = [(page, code) for page in ("README.md", "docs/llm.md") for code in examples(page) if "LLM(" in code]


def test_every_example_of_these_pages_is_run() -> None:
    assert len(CLIENTS) == 3 and len(SCRIPTS) == 2
    assert len(examples("README.md") + examples("docs/client.md") + examples("docs/llm.md")) == 5


@pytest.mark.parametrize(("page", "code"), CLIENTS, ids=[f"{page} {place}" for place, (page, _) in enumerate(CLIENTS)])
async def test_an_example_of_a_client_streams_the_answer(
    server: Server, page: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    top_level_await = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT  # as in a notebook
    result = eval(compile(code.replace(ADDRESS, server.grpc), page, "exec", top_level_await), {})
    if inspect.isawaitable(result):
        await result
    assert capsys.readouterr().out.startswith(" Paris")


@pytest.mark.parametrize(("page", "code"), SCRIPTS, ids=[page for page, _ in SCRIPTS])
def test_an_example_of_an_llm_is_a_script(page: str, code: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" Paris")
    if page == "docs/llm.md":
        told = re.findall(r"^([01]) (['\"].*['\"]) (?:None|stop)$", done.stdout, re.M)
        for index in "01":
            text = "".join(ast.literal_eval(text) for which, text in told if which == index)
            assert json.loads(text).keys() == {"city"}
