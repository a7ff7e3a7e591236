"""docs/clients.md, "Field by field": every field there is, sent as its row says, is answered as its row says.

That a real engine takes what the gateway does is in clients/test_clients.py.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from clients.page import CHAT, COMPLETIONS, PAGE, Row, field_rows
from fakes.inference_server import InferenceServer, pieces
from minisgl_client.aio import AsyncClient
from minisgl_client.gateway.app import build_app
from minisgl_client.gateway.backends import Backend, Backends
from minisgl_client.gateway.fields import NO_EFFECT, REFUSED, ChatBody, CompletionBody
from minisgl_client.gateway.settings import GatewaySettings

TESTS = Path(__file__).resolve().parents[3]
ROWS = field_rows()


@pytest.fixture
async def gateway(server: InferenceServer) -> AsyncIterator[httpx.AsyncClient]:
    server.script = pieces("yes", reason="stop")
    async with AsyncClient(server.url) as client:
        app = build_app(GatewaySettings(), Backends(Backend(client, None)))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
            yield http


def test_every_field_has_a_row_with_itself_in_it() -> None:
    read = {*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__}
    assert {row.field for row in ROWS} == read | NO_EFFECT | REFUSED.keys()
    assert all(row.field in row.sent for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.field)
async def test_a_field_is_answered_as_its_row_says(row: Row, gateway: httpx.AsyncClient) -> None:
    for path in (COMPLETIONS, CHAT):
        answer = await gateway.post(path, json=row.body(path))
        said = row.verdicts[path]
        if row.accepted(path):
            assert answer.status_code == 200, answer.text
        else:
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, said)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.field)
def test_a_field_says_what_becomes_of_it_and_where_that_is_tested(row: Row) -> None:
    for path, kind in ((COMPLETIONS, CompletionBody), (CHAT, ChatBody)):
        if row.accepted(path):
            assert (row.verdicts[path] == "no effect") is (row.field in NO_EFFECT)
            assert row.field in NO_EFFECT or row.field in kind.__struct_fields__
    for name in re.findall(r"`([^`]+\.py)`", row.tested):
        assert re.search(rf"\b{row.field}\b", (TESTS / name).read_text(encoding="utf-8")), (
            f"{name} knows no {row.field}"
        )
    if row.field in REFUSED or row.field in NO_EFFECT:
        assert not row.tested, "this test is the one"
    else:
        assert row.tested


@pytest.mark.parametrize(
    ("client", "package"),
    [
        ("`openai`", "openai"),
        ("litellm", "litellm"),
        ("LangChain", "langchain-openai"),
        ("LlamaIndex", "llama-index-llms-nvidia-triton"),
        ("tritonclient", "tritonclient"),
    ],
)
def test_the_versions_are_those_that_are_tested(client: str, package: str) -> None:
    pins = [TESTS.parent / "constraints.txt", *(TESTS / "clients").glob("*.txt")]
    (pinned,) = re.findall(rf"^{package}==(\S+)$", "\n".join(path.read_text() for path in pins), re.MULTILINE)
    told = re.findall(rf"^\| {client}: [^|]*\| (\S+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert told and set(told) == {pinned}
