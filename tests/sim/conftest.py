"""Fixtures of the simulation tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.tiny_model import make_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(params=[False, True], ids=["depth-0", "overlap"])
def overlap(request: pytest.FixtureRequest) -> bool:
    """Whether the next step is planned while one runs: what is true of the engine is true either way."""
    return bool(request.param)
