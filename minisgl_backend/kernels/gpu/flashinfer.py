"""FlashInfer, as far as it is used: its two paged wrappers (Ye et al. 2025), loaded only where somebody wants them.

The package is an extra of ours, and its kernels are compiled when a shape is first planned for, minutes once for each
model on a machine (`FLASHINFER_WORKSPACE_BASE` says where they are kept); tests/gpu/build_flashinfer.py does it ahead.
Signatures are those of 0.7.4; a test compares them with the record in tests/fakes/flashinfer_signatures.json.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

from torch import Tensor

LEAST_CAPABILITY = (8, 0)
"""GPUs before Ampere have no bf16, and nobody here has tried FlashInfer on one."""

HEAD_DIMS = (64, 128, 256)

_USUAL_HOME = "/usr/local/cuda"  # where FlashInfer looks, too


class PagedWrapper(Protocol):
    """What both wrappers have: one plan for all layers that attend alike, then a run for each."""

    def plan(self, *pages: Tensor | int, **variant: Any) -> None:
        """Takes int32 tensors: bounds of rows and of pages and the lengths of last pages on the host, page numbers on
        the device. Copies its schedule to the device from pinned memory of its own, which the next plan overwrites.
        """
        ...

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], /, *, out: Tensor) -> Tensor: ...

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None: ...


class WrapperClass(Protocol):
    """How a wrapper is made. kv_layout: "NHD", that of the pool."""

    def __call__(self, float_workspace_buffer: Tensor, kv_layout: str, **options: Any) -> PagedWrapper: ...


@dataclass(frozen=True, slots=True)
class FlashInfer:
    """The package."""

    version: str
    chunks: WrapperClass  # BatchPrefillWithPagedKVCacheWrapper
    decode: WrapperClass  # BatchDecodeWithPagedKVCacheWrapper


class FlashInferMissing(Exception):
    """It can not be had here. The message says why."""


def load_flashinfer(capability: tuple[int, int], environment: Mapping[str, str] = os.environ) -> FlashInfer:
    """capability: of the GPU. Raises FlashInferMissing."""
    if capability < LEAST_CAPABILITY:
        raise FlashInferMissing("the GPU is of capability {}.{}, and it needs 8.0".format(*capability))
    try:
        package = importlib.import_module("flashinfer")
    except ModuleNotFoundError as error:
        missing = "the package flashinfer" if error.name == "flashinfer" else f"{error.name}, which flashinfer needs,"
        raise FlashInferMissing(f"{missing} is not installed (pip install minisgl-triton[flashinfer])") from None
    except Exception as error:  # it looks for compilers, drivers and other packages when it is imported
        raise FlashInferMissing(f"flashinfer can not be imported: {error}") from error
    if missing := kernels_missing(environment):
        raise FlashInferMissing(missing)
    return FlashInfer(
        version=package.__version__,
        chunks=package.BatchPrefillWithPagedKVCacheWrapper,
        decode=package.BatchDecodeWithPagedKVCacheWrapper,
    )


def kernels_missing(environment: Mapping[str, str]) -> str:
    """Why the package has no kernels here and can make none; empty: it has, or can. It would only say so with the
    first step, and an engine that could have done without it would not start.
    """
    if (
        environment.get("FLASHINFER_DISABLE_JIT") or find_spec("flashinfer_jit_cache") is not None
    ):  # they were made ahead
        return ""
    homes = [environment.get("CUDA_HOME"), environment.get("CUDA_PATH"), _USUAL_HOME]
    compilers = [f"{home}/bin/nvcc" for home in homes if home]
    if shutil.which("nvcc", path=environment.get("PATH")) or any(os.access(path, os.X_OK) for path in compilers):
        return ""
    return (
        "flashinfer has no kernels here: it compiles them with nvcc, which is neither on the PATH nor below CUDA_HOME, "
        "and the package flashinfer-jit-cache, which holds them, is not installed"
    )
