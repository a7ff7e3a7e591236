"""The pictures of the gateway's page in docs/images/, from a real server: `make screenshots`.

A small model answers a question for the first; for the second eight requests with shared prefixes run, and others wait.
Texts are shown in the engine view here: they are this script's own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import httpx
from playwright.sync_api import Page, expect

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from load.browser import browser
from load.serving import eventually, serving

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
SIZE: Any = {"width": 1280, "height": 800}
MOST_BYTES = 200_000
WATCHED_S = 40.0

QUESTIONS = (
    "Give me three tips for clear writing, as a list.",
    "Write a Python function that reverses a list, and explain it in two sentences.",
)
TEACHER = "You are a patient teacher of geography. Answer in short sentences, and give one example each time. "
CODER = "You are a careful programmer. Answer with one function in Python and a test of it, and nothing else. "
PROMPTS = [
    *(f"{TEACHER * 3}{topic}" for topic in ("How do rivers form?", "How do deltas form?", "Why do rivers bend?")),
    *(
        f"{TEACHER * 3}Think of the Alps. {topic}"
        for topic in ("Where does the Rhine begin?", "Where does the Po end?")
    ),
    *(f"{CODER * 4}{topic}" for topic in ("Sort a list of pairs.", "Parse a date.", "Count the words of a file.")),
    "Once upon a time",
    "The three laws of motion are",
]


def main() -> int:
    """Writes both."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    settings: Any = {"kv_bytes": 512 << 20, "max_running": 7, "show_prompts_in_engine_view": True}
    with serving("--model", "smollm2", "--dtype", "fp32", "--openai", "0", **settings) as server, browser() as chromium:
        found = eventually(lambda: re.search(r"OpenAI +(http://[^/]+)", "\n".join(server.lines)), 10, lambda: "")
        page = chromium.new_page(viewport=SIZE, color_scheme="light")
        page.set_default_timeout(300_000)
        page.goto(found[1])
        chat(page)
        engine(page, found[1])
    return 0


def chat(page: Page) -> None:
    """The first picture."""
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("160")
    for asked, question in enumerate(QUESTIONS):
        page.get_by_label("Message", exact=True).fill(question)
        page.keyboard.press("Enter")
        page.locator(".answer footer:not([hidden])").nth(asked).wait_for()
    page.evaluate("document.getElementById('scroller').scrollTop = 0")
    shoot(page, "chat.png")


def engine(page: Page, url: str) -> None:
    """The second one: after a while, so that the curves have something to tell."""
    page.get_by_role("link", name="Engine").click()
    page.set_viewport_size({**SIZE, "height": 1180})
    with busy(url):
        expect(page.locator("#waiting .row")).not_to_have_count(0, timeout=60_000)
        page.wait_for_timeout(WATCHED_S * 1e3)
        shoot(page, "engine.png")


@contextmanager
def busy(url: str) -> Iterator[None]:
    """Streams of all prompts, asked again as they end, until the block ends."""
    over = Event()

    def ask(number: int) -> None:
        while not over.is_set():
            asked = {"prompt": PROMPTS[number], "max_tokens": 60 + 40 * number, "stream": True, "ignore_eos": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=300) as answer:
                for _ in answer.iter_lines():
                    if over.is_set():
                        break

    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        asking = [clients.submit(ask, number) for number in range(len(PROMPTS))]
        try:
            yield
        finally:
            over.set()
        for one in asking:
            one.result()


def shoot(page: Page, name: str) -> None:
    """Small enough for a repository, or not at all."""
    path = FOLDER / name
    page.screenshot(path=path)
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise SystemExit(f"{path} has {size} bytes, more than {MOST_BYTES}")
    print(f"{path.relative_to(FOLDER.parents[1])}: {size} bytes")


if __name__ == "__main__":
    sys.exit(main())
