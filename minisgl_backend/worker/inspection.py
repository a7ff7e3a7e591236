"""What a model is and needs, told without loading its weights: behind `minisgl inspect`.

Where it stands in the flow: beside `build.py`, from whose parts it asks the same questions (device, dtype, pool) and
gets the same answers. Reads the small files and the heads of the weight files.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import torch

from minisgl_backend.config import EngineConfig
from minisgl_backend.device.device import open_device, resolve_dtype
from minisgl_backend.errors import StartError
from minisgl_backend.kvpool.sizing import bytes_per_page, useful_pages
from minisgl_backend.layers.quant.int4 import GROUP
from minisgl_backend.models.checkpoint import check_tensors
from minisgl_backend.models.files import is_gguf
from minisgl_backend.models.folder import read_model_spec
from minisgl_backend.models.gguf_file import GgufFile
from minisgl_backend.models.limits import check_context_fits, context_limit
from minisgl_backend.models.load import open_source
from minisgl_backend.models.quantization import check_quantization, quantised_tensors
from minisgl_backend.models.ranks import check_ranks
from minisgl_backend.models.registry import FAMILIES
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.tensors import expected_tensors, unused_tensors
from minisgl_backend.models.weight_files import weight_files


class Needs(msgspec.Struct, frozen=True):
    """Memory under the settings, in bytes but for what is named otherwise."""

    device: str
    dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    context_tokens: int  # of one sequence
    kv_pool_bytes: int  # what the engine would take
    kv_pool_tokens: int
    free_bytes: int  # of the device, now


class Inspection(msgspec.Struct, frozen=True):
    """What a path holds. `faults` is empty when the engine can serve it under the settings."""

    path: str
    architecture: str
    models: str  # whose architecture it is
    parameters: int
    checkpoint: str  # "safetensors" or "gguf"
    checkpoint_bytes: int  # of the weight files
    num_tensors: int  # in them
    spec: dict[str, object]  # ModelSpec, for scripts
    rotary: tuple[str, ...]  # kinds, of spec's ropes
    needs: Needs
    faults: tuple[str, ...]


def inspect_model(config: EngineConfig, path: Path) -> Inspection:
    """path: of `locate_model`. Raises StartError where not even the model's configuration can be read."""
    spec = read_model_spec(path)
    faults: list[str] = []
    expected, present = expected_tensors(spec), {}
    try:
        present = dict(open_source(spec, path).shapes())
        check_tensors(expected, present, unused_tensors(spec))
        check_quantization(config.quantization, spec, gguf=is_gguf(path))
    except StartError as error:
        faults.append(str(error))
    needs = _needs(config, spec, path)
    try:
        check_ranks(spec, config.tensor_parallel, config.quantization)
        check_context_fits(config, spec, needs.context_tokens, needs.free_bytes)
    except StartError as error:
        faults.append(str(error))
    if needs.weight_bytes + needs.kv_bytes_per_token * config.page_size > needs.free_bytes:
        faults.append(
            f"weights of {needs.weight_bytes:,} bytes and a page do not fit into {needs.free_bytes:,} bytes "
            f"that {needs.device} has free"
        )
    if not needs.kv_pool_tokens:
        faults.append("no page of the KV pool fits; lower 'page_size' or raise 'kv_bytes'")
    return Inspection(
        path=str(path),
        architecture=spec.architecture,
        models=FAMILIES[spec.architecture].models,
        parameters=sum(math.prod(shape) for shape in expected.values()),
        checkpoint="gguf" if is_gguf(path) else "safetensors",
        checkpoint_bytes=sum(file.stat().st_size for file in weight_files(path)),
        num_tensors=len(present),
        spec=msgspec.to_builtins(spec),
        rotary=tuple(rope.kind for rope in spec.ropes),
        needs=needs,
        faults=tuple(faults),
    )


def _needs(config: EngineConfig, spec: ModelSpec, path: Path) -> Needs:
    device = open_device("cpu" if config.device == "fake" else config.device, config.threads)
    dtype = resolve_dtype(device, config.dtype, getattr(torch, spec.dtype))
    weights = _weight_bytes(config, spec, dtype.itemsize, path)
    page_bytes = bytes_per_page(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype.itemsize, config.page_size)
    context = context_limit(config, path)
    useful = useful_pages(config.max_running, context, config.page_size) * page_bytes
    free = device.free_memory_bytes()
    room = max(free - weights, 0)
    pool = config.kv_bytes or min(
        device.kv_pool_bytes(utilization=config.gpu_memory_utilization, peak_bytes=weights, useful_bytes=useful), room
    )
    return Needs(
        device=device.name,
        dtype=str(dtype).removeprefix("torch."),
        weight_bytes=weights,
        kv_bytes_per_token=page_bytes // config.page_size,
        context_tokens=context,
        kv_pool_bytes=pool,
        kv_pool_tokens=pool // page_bytes * config.page_size,
        free_bytes=free,
    )


def _weight_bytes(config: EngineConfig, spec: ModelSpec, item_bytes: int, path: Path) -> int:
    """Of all tensors as the engine would hold them: see models/weights.py for what `quantization` takes."""
    if config.quantization == "gguf" and is_gguf(path):
        tensors = GgufFile(path).tensors.values()
        return sum(math.prod(t.shape) * item_bytes if t.type.values == 1 else t.size for t in tensors)
    quantised = frozenset(quantised_tensors(spec))
    total = 0
    for name, shape in expected_tensors(spec).items():
        values = math.prod(shape)
        if config.quantization == "int8" and name in quantised:
            total += values + 4 * shape[0]  # a scale in fp32 for each row
        elif config.quantization == "int4" and name in quantised:
            total += values // 2 + 4 * (values // GROUP)  # scale and minimum in fp16 for each group
        else:
            total += values * item_bytes
    return total
