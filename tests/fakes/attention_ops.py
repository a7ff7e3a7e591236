"""Writes down what torch is asked to do: operations, bytes they give, pairs of query and key that are multiplied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fakes.attention_case import AttentionCase
from minisgl_backend.attention.torch_backend import TorchAttention

_VIEWS = ("select.", "slice.", "flatten.", "view.", "transpose.", "unsqueeze.", "expand.", "permute.", "reshape.")
_MOVES = ("lift_fresh.", "to.dtype_layout")  # from numpy, which copy nothing on a CPU


class AttentionOps(TorchDispatchMode):
    """Views are left out. Under inference mode, in which scaled_dot_product_attention is one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.made_bytes = 0  # by all but those that change a tensor in place
        self.gathered_bytes = 0  # of pages
        self.pairs = 0  # of query and key in whole products, those of all heads and rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        if name.startswith((*_VIEWS, *_MOVES)):
            return result
        self.names.append(name.split(".")[0])
        if isinstance(result, Tensor) and not self.names[-1].endswith("_"):
            self.made_bytes += result.numel() * result.element_size()
        if name.startswith("index_select"):
            self.gathered_bytes += result.numel() * result.element_size()
        if name.startswith("scaled_dot_product_attention"):
            self.pairs += args[0].shape[:-1].numel() * args[1].shape[-2]
        return result


def ops_of_begin(case: AttentionCase) -> AttentionOps:
    with torch.inference_mode(), AttentionOps() as ops:
        TorchAttention(case.pool, case.variants).begin(case.step)
    return ops


def ops_of_attend(case: AttentionCase, layer: int) -> AttentionOps:
    """Of one layer in a step that has begun."""
    with torch.inference_mode():
        attention = TorchAttention(case.pool, case.variants).begin(case.step)
        inputs = case.queries, case.new(case.keys, layer), case.new(case.values, layer), case.sinks[layer]
        with AttentionOps() as ops:
            attention.attend(layer, *inputs)
    return ops
