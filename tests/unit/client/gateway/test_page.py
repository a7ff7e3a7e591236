"""The files of the page: what is served, with which headers, and what no line of them may hold."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

import minisgl_client.gateway.page as page
from fakes.inference_server import InferenceServer
from minisgl_client.aio import AsyncClient
from minisgl_client.gateway.app import build_app
from minisgl_client.gateway.backends import Backend, Backends
from minisgl_client.gateway.settings import GatewaySettings

WEB = Path(page.__file__).with_name("web")
OURS = [file for file in sorted(WEB.iterdir()) if not file.name.startswith("marked.")]
INDEX = (WEB / "index.html").read_text(encoding="utf-8")


@pytest.fixture
async def http(server: InferenceServer) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway that asks everybody for a key."""
    async with AsyncClient(server.url) as client:
        app = build_app(GatewaySettings(api_keys=("secret",)), Backends(Backend(client, None)))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
            yield http


async def test_every_file_that_the_page_names_is_served_without_a_key(http: httpx.AsyncClient) -> None:
    asked = {f"/{name}" for name in re.findall(r'(?:href|src)="(page/[^"]+)"', INDEX)}
    for file in WEB.glob("*.js"):
        asked |= {f"/page/{name}" for name in re.findall(r'from "\./([^"]+)"', file.read_text(encoding="utf-8"))}
    assert {f"/page/{file.name}" for file in WEB.iterdir()} - asked == {"/page/index.html", "/page/marked.LICENSE.md"}
    types = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".md": "text/plain"}
    for url in sorted({*asked, "/page/marked.LICENSE.md"}):
        answer = await http.get(url)
        assert answer.status_code == 200, url
        assert answer.headers["content-type"].startswith(types[Path(url).suffix])
        assert answer.content == (WEB / Path(url).name).read_bytes()
    assert (await http.get("/")).text == INDEX
    assert (await http.head("/")).headers["content-type"] == "text/html; charset=utf-8"


async def test_every_answer_of_the_page_forbids_what_does_not_belong_to_it(http: httpx.AsyncClient) -> None:
    for url in ("/", "/page/app.js"):
        headers = (await http.get(url)).headers
        rules = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
        assert rules["default-src"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
        assert {rules[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
        assert (rules["require-trusted-types-for"], rules["trusted-types"]) == ("'script'", "'none'")
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"


async def test_what_a_browser_has_is_not_sent_again_and_a_new_file_is(http: httpx.AsyncClient) -> None:
    tag = (await http.get("/page/app.js")).headers["etag"]
    again = await http.get("/page/app.js", headers={"If-None-Match": tag})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    other = await http.get("/page/app.js", headers={"If-None-Match": '"another"'})
    assert other.status_code == 200 and other.content


@pytest.mark.parametrize("name", ["index.html", "nothing.js", "../page.py", "..%2fpage.py", "%2e%2e/app.py", ""])
async def test_no_other_file_is_served(http: httpx.AsyncClient, name: str) -> None:
    answer = await http.get(f"/page/{name}")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "unknown_url"


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.name)
def test_no_text_becomes_html_or_code_and_nothing_comes_from_elsewhere(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|\beval\b"
    assert not re.search(rf"{forbidden}|new Function|setTimeout\(['\"`]|@import|url\(", text)
    assert set(re.findall(r"https?://[\w./]+", text)) <= {"http://www.w3.org/2000/svg"}


def test_the_markup_has_no_script_no_style_and_no_handler() -> None:
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", INDEX)
    assert all(re.match(r'<script (type="module" )?src="page/[\w.]+"></script>', tag) for tag in scripts())


def scripts() -> list[str]:
    return re.findall(r"<script.*?</script>", INDEX, re.DOTALL)


def test_every_field_and_button_has_a_name() -> None:
    for id in re.findall(r'<(?:input|textarea|select)[^>]*\sid="([^"]+)"', INDEX):
        assert f'for="{id}"' in INDEX, id
    for attributes, text in re.findall(r"<button([^>]*)>([^<]*)</button>", INDEX):
        assert text.strip() or "aria-label=" in attributes


def test_the_licence_of_the_one_file_that_is_not_ours_ships_beside_it() -> None:
    theirs = [file for file in WEB.iterdir() if file not in OURS]
    assert sorted(file.name for file in theirs) == ["marked.LICENSE.md", "marked.esm.js"]
    assert "MIT License" in (WEB / "marked.esm.js").read_text(encoding="utf-8")[:300]
    assert "Permission is hereby granted" in (WEB / "marked.LICENSE.md").read_text(encoding="utf-8")
