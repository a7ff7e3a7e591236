"""The gateway's page in headless Chromium, on the real server: a chat, and the view of the engine while it works.

The server runs two rows at most, so that others wait; Playwright's loop holds this thread, so the engine is asked from
another one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, TypeVar

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from fakes.gateway_page import PATIENCE_MS, PHONE, page_of, runs_over
from load.browser import browser
from load.serving import PATIENCE_S, Server, eventually, serving

T = TypeVar("T")

PREFIX = "You are a patient teacher, and you explain how rivers come to be. " * 6
ENDLESS: Any = {"max_tokens": 2000, "ignore_eos": True, "temperature": 0}
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Server, str]]:
    """And the address of its page."""
    with serving("--model", "smollm2", "--dtype", "fp32", "--openai", "0", kv_bytes=512 << 20, max_running=2) as server:

        def url() -> str | None:
            found = re.search(r"OpenAI +(http://[^/]+)", "\n".join(server.lines))
            return f"{found[1]}/" if found else None

        yield server, eventually(url, PATIENCE_S, lambda: "\n".join(server.lines))


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as chromium:
        yield chromium


@pytest.fixture
def page(running: tuple[Server, str], chromium: Browser) -> Iterator[Page]:
    """Opened; without a fault at the end, and the engine idle."""
    server, url = running
    with page_of(chromium) as (page, faults):
        page.goto(url)
        expect(page.locator("#model")).to_have_text("minisgl")
        yield page
        assert faults == []
    elsewhere(lambda: server.until_idle(PATIENCE_MS / 1e3))


def elsewhere(work: Callable[[], T]) -> T:
    """In a thread that has no loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def ask(page: Page, text: str, **fields: str) -> None:
    for label, value in fields.items():
        page.get_by_label(label.replace("_", " ")).fill(value)
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def test_a_chat_is_typed_and_its_answer_streams_to_its_end(page: Page) -> None:
    ask(page, "Name a river.", Temperature="0", Max_tokens="8")
    expect(page.locator(".answer .markdown")).not_to_be_empty()
    expect(page.locator(".answer .facts")).to_contain_text(re.compile("first word after .*[0-9]+ tokens, .* a second"))
    first = page.locator(".answer .markdown").inner_text()
    page.get_by_role("button", name="Ask again").click()
    expect(page.locator(".answer .facts")).to_contain_text(re.compile("prompt [0-9]+, [1-9][0-9]* cached"))
    assert page.locator(".answer .markdown").inner_text() == first != ""


def test_a_stopped_answer_leaves_no_row_in_the_engine(page: Page, running: tuple[Server, str]) -> None:
    server, _ = running
    before = elsewhere(server.stats).steps
    ask(page, "Write a long story about a river.", Temperature="0", Max_tokens="2000")
    streamed = page.locator(".answer.streams .markdown")
    expect(streamed).to_have_text(re.compile(r"\w+[\s\S]*"))
    page.get_by_role("link", name="Engine").click()
    expect(page.locator("#running .row")).to_have_count(1)
    page.get_by_role("link", name="Chat").click()
    expect(streamed).not_to_be_empty()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".answer .facts")).to_contain_text("stopped")
    page.get_by_role("link", name="Engine").click()
    expect(page.locator("#running .none")).to_be_visible()
    assert elsewhere(lambda: server.until_idle(PATIENCE_MS / 1e3)).steps - before < 2000


def test_the_engine_view_moves_while_requests_run(page: Page, running: tuple[Server, str]) -> None:
    _, url = running
    ends = [Event() for _ in range(4)]

    def stream(number: int) -> None:
        """Until it is told to leave, which it hears with its next word."""
        asked = {"prompt": f"{PREFIX}{number}, {'rain ' * 20}", "stream": True, **ENDLESS}
        with httpx.stream("POST", f"{url}v1/completions", json=asked, timeout=300) as answer:
            assert answer.status_code == 200
            next(line for line in answer.iter_lines() if ends[number].is_set())

    page.get_by_role("link", name="Engine").click()
    expect(page.locator("#running .none")).to_be_visible()
    with ThreadPoolExecutor(4) as clients:
        try:
            streams = [clients.submit(stream, number) for number in range(2)]
            expect(page.locator("#running .row")).to_have_count(2)
            streams += [clients.submit(stream, number) for number in range(2, 4)]
            expect(page.locator("#waiting .row")).to_have_count(2)
            first = page.locator("#waiting .row").first.get_attribute("data-id")
            output = page.locator("#running .row").first.locator("td").nth(3)
            expect(output).not_to_have_text(output.inner_text())
            expect(page.locator(".tile").first.locator(".value")).not_to_have_text(re.compile("^0.0"))
            expect(page.locator("#tree g.locked.shared")).not_to_have_count(0)
            expect(page.locator("#pages-legend li").nth(0)).to_have_text(re.compile("tree, in use [1-9]"))
            ends[0].set()
            expect(page.locator(f'#running .row[data-id="{first}"]')).to_have_count(1)
            expect(page.locator("#waiting .row")).to_have_count(1)
        finally:
            for end in ends:
                end.set()
        for one in streams:
            one.result()
    expect(page.locator("#running .none")).to_be_visible()
    expect(page.locator("#waiting .none")).to_be_visible()
    expect(page.locator(".tile").filter(has_text="Time to first token")).to_contain_text(re.compile(r"\d m?s p50"))
    expect(page.locator("#pages-legend li").nth(1)).to_have_text(re.compile("tree, reusable [1-9]"))
    expect(page.locator("#tree g text").filter(has_text="teacher")).to_have_count(0)  # no prompt is shown


def test_both_views_fit_a_phone(chromium: Browser, running: tuple[Server, str]) -> None:
    with page_of(chromium, viewport=PHONE, has_touch=True, is_mobile=True) as (page, faults):
        page.goto(running[1])
        expect(page.locator("#model")).to_have_text("minisgl")
        assert runs_over(page) == 0
        page.get_by_role("link", name="Engine").tap()
        expect(page.locator("#engine-state")).to_have_text("ready")
        assert runs_over(page) == 0 and faults == []
