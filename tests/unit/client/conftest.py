from __future__ import annotations

from collections.abc import Iterator

import pytest

from fakes.inference_server import InferenceServer, inference_server


@pytest.fixture
def server() -> Iterator[InferenceServer]:
    with inference_server() as server:
        yield server
