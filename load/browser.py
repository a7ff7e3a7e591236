"""A headless Chromium of the system, for the tests and the pictures of the gateway's page.

Playwright drives it and downloads nothing: the browser is Debian's package, which `make system-deps` installs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome")
"""The first that the PATH holds is taken."""

_START_MS = 180_000
_OPTIONS = ("--disable-dev-shm-usage",)  # a container's /dev/shm may be small


def find_browser() -> str:
    """The program. Raises FileNotFoundError with the command that installs one."""
    for name in PROGRAMS:
        if found := shutil.which(name):
            return found
    raise FileNotFoundError(f"none of {', '.join(PROGRAMS)} is in the PATH; `make system-deps` installs the first")


@contextmanager
def browser() -> Iterator[Browser]:
    """Ended with the block, as is Playwright's own process. Not within a running asyncio loop."""
    program = find_browser()
    with sync_playwright() as playwright:
        # Root has no sandbox, and Playwright's default is none; the pages are our own.
        browser = playwright.chromium.launch(executable_path=program, args=list(_OPTIONS), timeout=_START_MS)
        try:
            yield browser
        finally:
            browser.close()
