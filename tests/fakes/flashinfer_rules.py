"""What FlashInfer demands of its callers and what it computes, behind the two wrappers of fakes/flashinfer.py.

Beside what it refuses itself, refused here is what it would accept and ignore (sinks), what would quietly cost a
synchronisation (plans from device memory), a compilation (keys and values of different strides) or a copy, and what
would read or write beside a tensor.

`run` is an operator of torch's, so that whoever records a step by its operators replays it, over the buffers as they
are then. Who replays without a new plan gets the rows of the old one, as on a GPU.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

HEAD_DIMS = (64, 128, 256)
CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8, 16)  # DISPATCH_GQA_GROUP_SIZE in utils.cuh
LEAST_WORKSPACE_BYTES = 64 << 20
INT_WORKSPACE_BYTES = 8 << 20
_PLANNED = (
    *("num_qo_heads", "num_kv_heads", "page_size", "sm_scale", "window_left", "logits_soft_cap"),
    *("q_data_type", "kv_data_type"),
)


class WrongCall(AssertionError):
    """FlashInfer would refuse the call, or, worse, would not."""


class Wrapper:
    """What both wrappers share: workspaces, the plan, and what is computed."""

    def open(self, workspace: Tensor, kv_layout: str, graph: bool, indptr: Any, indices: Any, last: Any) -> None:
        check(kv_layout == "NHD", f"kv_layout {kv_layout}: the pool's is NHD")
        check(workspace.dtype == torch.uint8 and workspace.dim() == 1, "the workspace is bytes")
        check(workspace.numel() >= LEAST_WORKSPACE_BYTES, f"a workspace of {workspace.numel()} bytes may not do")
        check(workspace.data_ptr() % 16 == 0, "the workspace is not aligned")
        self.workspace, self.device, self.graph = workspace, workspace.device, graph
        self.int_workspace_bytes = INT_WORKSPACE_BYTES
        self.planned: dict[str, Any] | None = None
        self.plans: list[dict[str, Any]] = []
        self.runs = 0
        if graph:
            for name, buffer in (("indptr", indptr), ("indices", indices), ("last_page_len", last)):
                check(torch.is_tensor(buffer), f"{name} should be a torch.Tensor in cudagraph mode")
                check_ints(buffer, f"the buffer of {name}", self.device)
            check(len(indptr) == len(last) + 1, "the buffer of indptr should have batch_size + 1")
        else:
            check(indptr is None and indices is None and last is None, "buffers without a graph are ignored")
        self.indptr, self.indices, self.last_page_len = indptr, indices, last
        self.handle = id(self)
        _WRAPPERS[self.handle] = self

    def reset(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        for buffer in (float_workspace_buffer, int_workspace_buffer):
            check(buffer.dtype == torch.uint8 and buffer.data_ptr() % 16 == 0, "a workspace is aligned bytes")
            check(buffer.device == self.device, "a workspace of another device")
        check(not self.plans, "the workspace of a plan is taken away")
        self.workspace, self.int_workspace_bytes = float_workspace_buffer, int_workspace_buffer.numel()

    def take_plan(
        self, indptr: Tensor, indices: Tensor, last: Tensor, head_dim: int, given: Mapping[str, Any], **more: Any
    ) -> None:
        """given: the arguments of a plan. Checks pages and heads, and takes what the kernels will read."""
        plan = {**{name: given[name] for name in _PLANNED}, "head_dim": head_dim, **more}
        plan["kv_data_type"] = plan["kv_data_type"] or plan["q_data_type"]
        page_size = plan["page_size"]
        check_ints(indptr, "indptr", torch.device("cpu"))
        check_ints(last, "last_page_len", torch.device("cpu"))
        check_ints(indices, "indices", self.device)
        rows = len(last)
        check(len(indptr) == rows + 1 and rows > 0, f"{len(indptr)} bounds of pages, {rows} rows")
        check(int(indptr[0]) == 0 and bool((indptr.diff() >= 1).all()), "indptr begins with 0 and rows have pages")
        check(int(indptr[-1]) == len(indices), f"{len(indices)} pages, {int(indptr[-1])} by indptr")
        check(bool(((last >= 1) & (last <= page_size)).all()), "last_page_len is from 1 to page_size")
        heads, kv_heads = plan["num_qo_heads"], plan["num_kv_heads"]
        check(heads % kv_heads == 0, f"{heads} heads, {kv_heads} of keys")
        check(plan["head_dim"] in HEAD_DIMS, f"head_dim {plan['head_dim']}")
        for name in ("q_data_type", "kv_data_type"):
            check(plan[name] in (torch.float16, torch.bfloat16), f"{name} {plan[name]}: fp16 or bf16, by name")
        check(plan["window_left"] >= -1, f"window_left {plan['window_left']}")
        check(plan["logits_soft_cap"] is None or plan["logits_soft_cap"] >= 0, "a negative cap")
        if self.graph:
            check(rows == len(self.last_page_len), "The batch size should be fixed in cudagraph mode")
            check(len(indices) <= len(self.indices), "The size of indices should be at most the allocated buffer")
            if self.planned is not None:
                for name in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size", "window_left"):
                    check(plan[name] == self.planned[name], f"{name} has changed behind a graph")
            self.indptr.copy_(indptr)
            self.last_page_len.copy_(last)
            self.indices[: len(indices)].copy_(indices)
        else:
            self.indptr, self.indices, self.last_page_len = indptr.clone(), indices, last.clone()
        self.planned = {**plan, "pages": (indptr.tolist(), last.tolist())}
        self.plans.append({**plan, "indptr": indptr, "indices": indices, "last_page_len": last})

    def launch(self, q: Tensor, cache: Any, args: tuple[Any, ...], out: Tensor | None) -> Tensor:
        """Checks what the kernels are to read and write; launches."""
        check(not args, "arguments of a custom kernel")
        plan = self.planned
        check(plan is not None, "run before plan")
        assert plan is not None
        check(isinstance(cache, tuple) and len(cache) == 2, "the cache is a pair of keys and values")
        k_pages, v_pages = cache
        shape = (plan["page_size"], plan["num_kv_heads"], plan["head_dim"])
        for name, pages in (("keys", k_pages), ("values", v_pages)):
            check(pages.dim() == 4 and tuple(pages.shape[1:]) == shape, f"{name} are {tuple(pages.shape)}, not {shape}")
            check(pages.dtype == plan["kv_data_type"], f"{name} are {pages.dtype}")
            check(pages.device == self.device, f"{name} are on {pages.device}")
            check(pages.stride(-1) == 1, f"{name} have gaps")
        check(k_pages.stride() == v_pages.stride(), "strides of keys and values differ: another kernel, compiled now")
        tokens = self.tokens()
        expected = (tokens, plan["num_qo_heads"], plan["head_dim"])
        check(tuple(q.shape) == expected, f"q is {tuple(q.shape)}, planned was {expected}")
        check(q.dtype == plan["q_data_type"] and q.device == self.device, f"q is {q.dtype} on {q.device}")
        check(q.stride(-1) == 1, "q has gaps in a head")
        check(out is not None, "without out memory is taken")
        assert out is not None
        check(out.shape == q.shape and out.dtype == q.dtype and out.device == q.device, "out is not like q")
        check(out.is_contiguous(), "out has gaps, which the kernels write over")
        torch.ops.minisgl_fake_flashinfer.run.default(self.handle, q, k_pages, v_pages, out)
        return out

    def tokens(self) -> int:
        raise NotImplementedError

    def row_tokens(self) -> list[int]:
        """First token of each row, and behind the last."""
        raise NotImplementedError

    def compute(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor) -> None:
        plan = self.planned
        assert plan is not None
        self.runs += 1
        pages = (self.indptr.tolist(), self.last_page_len.tolist())
        check(pages == plan["pages"], "the buffers were written behind the plan's back")
        firsts, bounds = self.row_tokens(), pages[0]
        for row, last in enumerate(pages[1]):
            indices = self.indices[bounds[row] : bounds[row + 1]].long()
            check(bool(((indices >= 0) & (indices < len(k_pages))).all()), "a page that the pool has not")
            length = (len(indices) - 1) * plan["page_size"] + last
            span = slice(firsts[row], firsts[row + 1])
            keys, values = (x[indices].flatten(0, 1)[:length] for x in (k_pages, v_pages))
            out[span] = _attend(q[span], keys, values, plan).to(out.dtype)


def _attend(q: Tensor, keys: Tensor, values: Tensor, plan: dict[str, Any]) -> Tensor:
    """q [n, heads, d], of the last n of the tokens of keys and values [length, kv_heads, d] → the same, fp64."""
    group = q.shape[1] // keys.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scale = plan["sm_scale"] if plan["sm_scale"] is not None else q.shape[2] ** -0.5
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * scale
    if plan["logits_soft_cap"]:
        scores = plan["logits_soft_cap"] * torch.tanh(scores / plan["logits_soft_cap"])
    behind = torch.arange(len(keys) - len(q), len(keys))[:, None] - torch.arange(len(keys))[None, :]
    hidden = behind < 0
    if plan["window_left"] >= 0:
        hidden |= behind > plan["window_left"]
    return torch.einsum("hnl,lhd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise WrongCall(otherwise)


_signature = functools.cache(inspect.signature)


def only(function: Callable[..., Any], given: Mapping[str, Any], *used: str) -> None:
    """given: the arguments of a call. Those that are not used here are left at their defaults."""
    for name, parameter in _signature(function).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and name not in ("self", *used):
            check(given[name] == parameter.default, f"{name} is {given[name]!r}")


def check_ints(tensor: Tensor, name: str, device: torch.device) -> None:
    check(tensor.dtype == torch.int32, f"{name} is {tensor.dtype}, kernels read int32")
    check(tensor.dim() == 1 and tensor.is_contiguous(), f"{name} has gaps or dimensions")
    check(tensor.device == device, f"{name} is on {tensor.device}, read on {device}")


_WRAPPERS: weakref.WeakValueDictionary[int, Wrapper] = weakref.WeakValueDictionary()
_LIBRARY = torch.library.Library("minisgl_fake_flashinfer", "DEF")
_LIBRARY.define("run(int wrapper, Tensor q, Tensor k_pages, Tensor v_pages, Tensor(a!) out) -> ()")


@torch.library.impl(_LIBRARY, "run", "CPU")
def _run(wrapper: int, q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor) -> None:
    with torch._C.DisableTorchFunction():  # who forbids to read values on the host means the caller's
        _WRAPPERS[wrapper].compute(q, k_pages, v_pages, out)
