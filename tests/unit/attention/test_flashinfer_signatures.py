"""The fake of FlashInfer is called as the real one is."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from fakes import flashinfer as fake

RECORD: dict[str, Any] = json.loads(
    (Path(fake.__file__).parent / "flashinfer_signatures.json").read_text(encoding="utf-8")
)


def signatures(package: Any) -> dict[str, str]:
    return {
        f"{wrapper}.{method}": fake.signature_text(getattr(getattr(package, wrapper), method))
        for wrapper, methods in fake.METHODS.items()
        for method in methods
    }


def test_the_fakes_signatures_are_those_of_flashinfer() -> None:
    assert signatures(fake) == RECORD["signatures"]


def test_the_record_is_of_the_version_that_the_extra_allows() -> None:
    lines = Path(__file__).parents[3].joinpath("pyproject.toml").read_text(encoding="utf-8").splitlines()
    (wanted,) = (line for line in lines if '"flashinfer-python' in line)
    major, minor, patch = RECORD["version"].split(".")
    assert f'"flashinfer-python>={major}.{minor}.{patch},<{major}.{int(minor) + 1}"' in wanted


def test_the_record_is_that_of_flashinfer_where_it_is_installed() -> None:
    try:
        version = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("flashinfer is not installed")
    real = pytest.importorskip("flashinfer", exc_type=ImportError)
    assert signatures(real) == RECORD["signatures"], f"of {version}; scripts/flashinfer_signatures.py writes it"
