"""Client stacks that people bring along, unchanged, on the real server: gateway, /generate and gRPC of one engine.

Each runs in an environment of its own (`environments.py`), in one process, whose checks (`with_*.py`) are the tests
here. After each the engine is idle again, and what a check left was cut short. And docs/clients.md: its examples run,
and the engine takes every field that its table says is taken. OpenAI's own client, tritonclient and ours are in
e2e/test_openai_gateway.py, e2e/test_tritonclient.py and e2e/test_client.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import httpx
import pytest

from clients.checks import BUILT_IN, Addresses
from clients.environments import HERE, STACKS, python_of
from clients.page import CHAT, COMPLETIONS, Row, example, field_rows
from fakes.chat_templates import HERMES
from load.serving import Server, eventually, serving
from minisgl_backend.models.locate import fetched_folder
from minisgl_client.client import Client
from minisgl_client.gateway.settings import KEYS_VARIABLE

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KEY = "key-of-this-test"
PROMPT = "The capital of France is"
TOKENS = 4
PATIENCE_S = 60.0
RUN_S = 600.0  # of a stack's process; then it hangs


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SmolLM2 with a chat template that takes tools, and a gateway beside tritonserver."""
    folder = tmp_path_factory.mktemp("smollm2")
    for file in fetched_folder("smollm2").iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(HERMES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEYS_VARIABLE, KEY)
        model = ("--model", str(folder), "--dtype", "fp32", "--openai", "0")
        with serving(*model, kv_bytes=256 << 20, allow_client_template=True) as server:
            yield server


@pytest.fixture(scope="module")
def addresses(server: Server) -> Addresses:
    """With the answers, asked by other ways than the stacks': gRPC, and plain HTTP to the gateway."""
    found = eventually(
        lambda: re.search(r"OpenAI +(http://\S+)", "\n".join(server.lines)), PATIENCE_S, lambda: "no gateway"
    )
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS, "temperature": 0}
    answer = httpx.post(
        f"{found[1]}/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=PATIENCE_S
    ).json()
    with Client(server.grpc) as client:
        longer = client.generate(PROMPT, max_tokens=TOKENS + 1, temperature=0).text
        completion = client.generate(PROMPT, max_tokens=TOKENS, temperature=0).text
    assert completion.startswith(" Paris")
    return Addresses(
        http=server.http,
        grpc=server.grpc,
        gateway=found[1],
        key=KEY,
        prompt=PROMPT,
        tokens=TOKENS,
        completion=completion,
        completion_and_one=longer,
        chat=answer["choices"][0]["message"]["content"],
        chat_tokens=answer["usage"]["prompt_tokens"],
        example="",
    )


def example_at(addresses: Addresses, client: str) -> str:
    """The page's code, asking this server."""
    places = {
        "http://127.0.0.1:9000/v1": addresses.gateway,
        "http://127.0.0.1:8000": addresses.http,
        "127.0.0.1:8000": addresses.http.removeprefix("http://"),
        "127.0.0.1:8001": addresses.grpc,
        '"none"': repr(addresses.key),
    }
    code = example(client)
    assert any(place in code for place in places)
    for place, ours in places.items():
        code = code.replace(place, ours)
    return code


class Outcomes:
    """Of the stacks' checks, each stack run when the first of them is asked for."""

    def __init__(self, server: Server, addresses: Addresses) -> None:
        self._server = server
        self._addresses = addresses
        self._told: dict[str, dict[str, str]] = {}

    def failure(self, stack: str, check: str) -> str:
        """Empty: it passed."""
        if stack not in self._told:
            self._told[stack] = self._run(stack)
        told = self._told[stack]
        return told.get(check, f"{stack} ended before it:\n{told['']}")

    def _run(self, stack: str) -> dict[str, str]:
        """Failures by check; by the empty name what was printed."""
        addresses = json.dumps(asdict(replace(self._addresses, example=example_at(self._addresses, STACKS[stack]))))
        command = [str(python_of(stack)), str(HERE / "checks.py"), str(HERE / f"with_{stack}.py"), addresses]
        # litellm asks the internet for prices when it is imported, unless it is told not to
        env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        failures: dict[str, str] = {}
        with subprocess.Popen(command, env=env, text=True, **pipes) as process:
            printed: list[str] = []
            assert process.stdin and process.stdout and process.stderr
            reader = threading.Thread(target=printed.extend, args=(process.stderr,))
            watchdog = threading.Timer(RUN_S, process.kill)
            for thread in (reader, watchdog):
                thread.start()
            try:
                before = self._server.stats().steps
                for line in process.stdout:
                    told = json.loads(line)
                    failures[told["name"]] = told["failure"] or self._not_over(before, told["left"])
                    before = self._server.stats().steps
                    if told["name"] != "leaves_by_dying":  # it is no more
                        process.stdin.write("\n")
                        process.stdin.flush()
            finally:
                process.kill()
                watchdog.cancel()
                reader.join()
        return {**failures, "": "".join(printed)}

    def _not_over(self, before: int, left: int | None) -> str:
        """Counted in steps of the engine, each a token of what was left: how long they take is the machine's matter."""
        try:
            steps = self._server.until_idle(PATIENCE_S).steps - before
        except AssertionError as error:
            return str(error)
        return "" if left is None or steps < left else f"{steps} steps were run, as if nobody had left"


@pytest.fixture(scope="module")
def outcomes(server: Server, addresses: Addresses) -> Outcomes:
    return Outcomes(server, addresses)


def checks_of(stack: str) -> list[str]:
    """Without importing what this environment has not."""
    text = (HERE / f"with_{stack}.py").read_text(encoding="utf-8")
    return [*BUILT_IN, *re.findall(r"^(?:async )?def (check_\w+|leaves_by_dying)\(", text, re.MULTILINE)]


@pytest.mark.parametrize(("stack", "check"), [(stack, check) for stack in STACKS for check in checks_of(stack)])
def test_a_client_works_unchanged(outcomes: Outcomes, stack: str, check: str) -> None:
    failure = outcomes.failure(stack, check)
    assert not failure, failure


@pytest.mark.parametrize("client", ["openai", "tritonclient"])
def test_the_pages_examples_of_clients_that_we_have_here_run(
    addresses: Addresses, client: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(example_at(addresses, client), {})
    assert capsys.readouterr().out.strip()


async def test_the_engine_takes_every_field_that_the_page_says_is_taken(server: Server, addresses: Addresses) -> None:
    """As it stands in the table, on both endpoints; with few tokens, but where the row says how many."""
    headers = {"Authorization": f"Bearer {KEY}"}
    asked = [(row, path) for row in field_rows() for path in (COMPLETIONS, CHAT) if row.accepted(path)]
    few = asyncio.Semaphore(8)

    async with httpx.AsyncClient(headers=headers, timeout=RUN_S) as http:

        async def refusal(row: Row, path: str) -> str:
            length = {} if "max_completion_tokens" in row.sent else {"max_tokens": 2}
            async with few:
                url = addresses.gateway.removesuffix("/v1") + path
                answer = await http.post(url, json={**length, **row.body(path)})
            return "" if answer.status_code == 200 and '{"error"' not in answer.text else f"{row.field}: {answer.text}"

        refusals = await asyncio.gather(*(refusal(row, path) for row, path in asked))
    assert len(asked) > 90 and not [one for one in refusals if one]
    await asyncio.to_thread(server.until_idle, PATIENCE_S)
