"""Fixtures of the simulation tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.tiny_model import make_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
