"""FlashInfer's two paged wrappers on a CPU, computed in fp64: the real signatures, which `flashinfer_signatures.json`
records, and rules stricter than the real ones (fakes/flashinfer_rules.py).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from fakes.flashinfer_rules import CUDA_CORE_GROUPS, Wrapper, check, check_ints, only

METHODS = {
    "BatchPrefillWithPagedKVCacheWrapper": ("__init__", "plan", "run", "reset_workspace_buffer"),
    "BatchDecodeWithPagedKVCacheWrapper": ("__init__", "plan", "_plan_impl", "run", "reset_workspace_buffer"),
}
"""What is called. Decode's `plan` hands its keywords on to `_plan_impl`, whose signature names them."""

PAGES = (
    *("indptr", "indices", "last_page_len"),
    *("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
    *("num_qo_heads", "num_kv_heads", "page_size"),
)
VARIANT = ("q_data_type", "kv_data_type", "sm_scale", "window_left", "logits_soft_cap")
GRAPH = (
    *("use_cuda_graph", "use_tensor_cores"),
    *("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"),
)


def signature_text(function: Any) -> str:
    """Names, kinds and defaults, without annotations."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
        variant_owns_mask=False,
        max_total_num_rows=None,
    ):
        check(
            backend == "fa2", f"backend {backend}: another is compiled when rows are long, or short, for the first time"
        )
        used = ("float_workspace_buffer", "kv_layout", "backend")
        only(BatchPrefillWithPagedKVCacheWrapper.__init__, locals(), *used)
        buffers = (paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        self.open(float_workspace_buffer, kv_layout, use_cuda_graph, *buffers)

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        self.reset(float_workspace_buffer, int_workspace_buffer)

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        seq_lens=None,
        seq_lens_q=None,
        block_tables=None,
        max_token_per_sequence=None,
        max_sequence_kv=None,
        fixed_split_size=None,
        disable_split_kv=False,
        uniform_q_len=None,
        use_token_head_sf=False,
    ):
        only(
            BatchPrefillWithPagedKVCacheWrapper.plan,
            locals(),
            *PAGES,
            *VARIANT,
            "head_dim_qk",
            "qo_indptr",
            "causal",
            "non_blocking",
        )
        check(causal, "chunks are causal")
        check_ints(qo_indptr, "qo_indptr", torch.device("cpu"))
        check(len(qo_indptr) == len(paged_kv_indptr), "qo_indptr has as many bounds as there are rows, and one more")
        check(
            int(qo_indptr[0]) == 0 and bool((qo_indptr.diff() >= 1).all()), "qo_indptr begins with 0, rows have tokens"
        )
        kv_lengths = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        check(bool((kv_lengths >= qo_indptr.diff()).all()), "a row has fewer keys than queries")
        self.take_plan(
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, head_dim_qk, locals(), bounds=qo_indptr.tolist()
        )

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        lse_base="log2",
        lse_layout="NH",
        enable_pdl=None,
        window_left=None,
        sinks=None,
        kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None,
        use_fp16_softmax=None,
        uses_spcompress=None,
    ):
        only(BatchPrefillWithPagedKVCacheWrapper.run, locals(), "q", "paged_kv_cache", "out")
        return self.launch(q, paged_kv_cache, args, out)

    def tokens(self) -> int:
        return self.row_tokens()[-1]

    def row_tokens(self) -> list[int]:
        assert self.planned is not None
        bounds: list[int] = self.planned["bounds"]
        return bounds


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    ):
        check(backend == "fa2", f"backend {backend}: any other may be frozen into a graph by its first plan")
        self.use_tensor_cores = use_tensor_cores
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        only(
            BatchDecodeWithPagedKVCacheWrapper.__init__,
            locals(),
            "float_workspace_buffer",
            "kv_layout",
            "backend",
            *GRAPH,
        )
        self.open(float_workspace_buffer, kv_layout, use_cuda_graph, *buffers)

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        self.reset(float_workspace_buffer, int_workspace_buffer)

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *deprecated_positional_args,
        **kwargs,
    ):
        check(not deprecated_positional_args, "a deprecated way to call")
        self._plan_impl(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **kwargs)

    def _plan_impl(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        pos_encoding_mode="NONE",
        window_left=-1,
        window_right=0,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        data_type=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        non_blocking=True,
        block_tables=None,
        seq_lens=None,
        fixed_split_size=None,
        disable_split_kv=False,
        q_len_per_req=1,
        is_causal=None,
        use_token_head_sf=False,
    ):
        only(BatchDecodeWithPagedKVCacheWrapper._plan_impl, locals(), *PAGES, *VARIANT, "head_dim", "non_blocking")
        group = num_qo_heads // num_kv_heads
        check(self.use_tensor_cores or group in CUDA_CORE_GROUPS, f"Unsupported group_size: {group}")
        self.take_plan(indptr, indices, last_page_len, head_dim, locals())

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        q_len_per_req=None,
        skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ):
        only(BatchDecodeWithPagedKVCacheWrapper.run, locals(), "q", "paged_kv_cache", "out")
        return self.launch(q, paged_kv_cache, args, out)

    def tokens(self) -> int:
        return len(self.last_page_len)

    def row_tokens(self) -> list[int]:
        return list(range(self.tokens() + 1))
