"""The checks of one part of the proof: each has a name and passes or fails, and the others are done all the same.

What was found so far stands in the part's JSON file after each check, so a part that is stopped has not been in vain.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Found = Mapping[str, Any] | None


@dataclass(frozen=True)
class Place:
    """Where a part runs."""

    device: torch.device
    only: torch.dtype | None = None  # of the dtypes

    @property
    def dry(self) -> bool:
        """There is no GPU: Triton's interpreter, on the smallest sizes."""
        return self.device.type != "cuda"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The interpreter's product of bf16 is wrong (Triton 3.9), so it is left out there."""
        served = (torch.float32, torch.float16) if self.dry else (torch.float32, torch.float16, torch.bfloat16)
        return tuple(dtype for dtype in served if self.only in (None, dtype))

    @property
    def two_dtypes(self) -> tuple[torch.dtype, ...]:
        """fp32 and, on a GPU, bf16: of engines, which are slow to interpret."""
        return tuple(dtype for dtype in self.dtypes if dtype == torch.float32 or dtype == torch.bfloat16)

    @property
    def half(self) -> torch.dtype:
        return torch.float16 if self.dry else torch.bfloat16

    def pick(self, large: Any, small: Any) -> Any:
        """By whether there is a GPU."""
        return small if self.dry else large


class Failed(Exception):
    """A check that found something wrong."""


@dataclass
class Report:
    """What a part found. Writes itself to `path` after each check."""

    part: str
    path: Path
    seconds: float
    header: Mapping[str, Any]
    began: float = field(default_factory=time.monotonic)
    checks: list[dict[str, Any]] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.write()

    @property
    def left_s(self) -> float:
        """Of the part's time."""
        return self.seconds - (time.monotonic() - self.began)

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check["passed"] for check in self.checks)

    def check(self, name: str, work: Callable[[], Found], *, needs_s: float = 0.0) -> bool:
        """work raises where something is wrong; what it returns is kept.

        needs_s: with less time left it is not begun, which counts as a failure.
        """
        began, entry = time.monotonic(), {"name": name, "passed": False}
        try:
            if self.left_s < needs_s:
                raise Failed(f"not begun: {self.left_s:.0f} s are left of the part's {self.seconds:.0f}")
            entry |= dict(work() or {})
            entry["passed"] = True
        except Exception as error:  # also a CUDA error: the checks after it will tell the same
            entry["error"] = f"{type(error).__name__}: {error}"[:1500]
            if not isinstance(error, (Failed, AssertionError)):
                print(traceback.format_exc(limit=-8), flush=True)
        entry["seconds"] = round(time.monotonic() - began, 2)
        self.checks.append(entry)
        print(f"{'ok    ' if entry['passed'] else 'FAILED'} {self.part}: {_line(entry)}", flush=True)
        self.write()
        return bool(entry["passed"])

    def tell(self, **values: Any) -> None:
        """Keeps what is no check."""
        self.told |= values
        self.write()

    def write(self) -> None:
        whole = {"part": self.part, **self.header, "passed": self.passed, **self.told, "checks": self.checks}
        aside = self.path.with_suffix(".new")
        aside.write_text(json.dumps(whole, default=str) + "\n", encoding="utf-8")
        aside.replace(self.path)


def _line(entry: Mapping[str, Any]) -> str:
    values = {key: value for key, value in entry.items() if key not in ("name", "passed", "seconds")}
    return f"{entry['name']} ({entry['seconds']} s) {json.dumps(values, default=str) if values else ''}"


ROUNDING = {torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of one number, relative to it, with room for the order of sums in fp32 and for a GPU's exp and rsqrt."""


def compare(got: Tensor, expected: Tensor, *, rms: float, most: float) -> dict[str, float]:
    """Errors relative to the root mean square of what is expected. Raises Failed; NaN where none is expected, too."""
    if got.shape != expected.shape:
        raise Failed(f"shape {list(got.shape)}, expected {list(expected.shape)}")
    wide, right = got.detach().double().cpu(), expected.detach().double().cpu()
    scale = right.square().mean().sqrt().item() or 1.0
    error = (wide - right) / scale
    found = {"rms": error.square().mean().sqrt().item(), "max": error.abs().max().item()}
    if not (found["rms"] <= rms and found["max"] <= most):
        raise Failed(f"errors {found} of a value that is 1 on average; allowed rms {rms}, max {most}")
    return {key: float(f"{value:.3g}") for key, value in found.items()}


def equal(got: object, expected: object, what: str) -> None:
    """Raises Failed, with both where they are short."""
    if got != expected:
        raise Failed(f"{what} differ: {str(got)[:400]} instead of {str(expected)[:400]}")
