"""One real server for the whole session: started once, and every test leaves it idle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from load.serving import Server, serving

_MIB = 1 << 20


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/e2e/" in item.path.as_posix():
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def running_server() -> Iterator[Server]:
    """SmolLM2 in fp32, with a pool that 64 streams of the tests fill."""
    with serving("--model", "smollm2", "--dtype", "fp32", kv_bytes=768 * _MIB, token_budget=512) as server:
        yield server


@pytest.fixture
def server(running_server: Server) -> Iterator[Server]:
    """Ready, and idle again after the test: no slot and no page lost."""
    yield running_server
    running_server.until_idle()
