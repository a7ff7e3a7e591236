"""Fixtures: both kinds of tokenizer, loaded once from folders as a model's. A conftest imports them by name."""

from __future__ import annotations

import pytest

from fakes.tokenizers import byte_level_folder, sentencepiece_folder
from minisgl_backend.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(byte_level_folder(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(sentencepiece_folder(tmp_path_factory.mktemp("sentencepiece")))


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each kind in turn."""
    found: Tokenizer = request.getfixturevalue(request.param)
    return found
