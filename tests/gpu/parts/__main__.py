"""One part of the proof: `python -m tests.gpu.parts PART --out FILE.json [--seconds 100]`, from the repository's root.

Without a GPU it runs dry: everything as small as it can be, in Triton's interpreter, which TRITON_INTERPRET=1 asks for
before Triton is imported.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import triton

from tests.gpu.checks import Place, Report

PARTS = {
    "numerics": ("pointwise", "experts", "attention", "sampling", "whole_model"),
    "graphs": ("graphs",),
    "overlap": ("overlap",),
    "flashinfer": ("flashinfer",),
}
"""Part → its modules, each with `run(report, place)`."""


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--only", help="one module of the part")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="where checks are for each: one")
    arguments = parser.parse_args(given)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        assert os.environ.get("TRITON_INTERPRET") == "1", "there is no GPU here: set TRITON_INTERPRET=1"
        torch.set_num_threads(1)  # the interpreter's own work is not torch's
    header = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu, interpreted",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    warnings.simplefilter("default")
    only = getattr(torch, arguments.dtype) if arguments.dtype else None
    report, place = Report(arguments.part, arguments.out, arguments.seconds, header), Place(device, only)
    for name in PARTS[arguments.part]:
        if arguments.only in (None, name):
            run_module(name, report, place)
    return 0 if report.passed else 1


def run_module(name: str, report: Report, place: Place) -> None:
    """One that can not be imported, or fails outside its checks, is a failed check."""
    try:
        importlib.import_module(f"tests.gpu.parts.{name}").run(report, place)
    except Exception as error:
        failed = error

        def tell() -> None:
            raise failed

        report.check(f"{name} as a whole", tell)


if __name__ == "__main__":
    sys.exit(main())
