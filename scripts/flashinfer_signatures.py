"""Writes tests/fakes/flashinfer_signatures.json: the signatures, in the FlashInfer that is installed, of all that is
called here. The strict fake in tests/fakes/flashinfer.py has the same ones, and a test holds it to that.

FlashInfer needs a GPU to run and none to be read:
    pip install --no-deps --target DIR flashinfer-python==VERSION apache-tvm-ffi nvidia-ml-py einops tabulate click \
        packaging requests
    PYTHONPATH=DIR:tests python scripts/flashinfer_signatures.py
"""

from __future__ import annotations

import json
from pathlib import Path

import flashinfer

from fakes.flashinfer import METHODS, signature_text

RECORD = Path(__file__).resolve().parents[1] / "tests" / "fakes" / "flashinfer_signatures.json"

if __name__ == "__main__":
    signatures = {
        f"{wrapper}.{method}": signature_text(getattr(getattr(flashinfer, wrapper), method))
        for wrapper, methods in METHODS.items()
        for method in methods
    }
    record = {"version": flashinfer.__version__, "signatures": signatures}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
