"""Attention over keys that come block by block, with what fused products do not know: soft caps and sinks. The torch
reference.

One pass with a running maximum (Milakov and Gimelshein 2018), so what it takes does not grow with the number of keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl_backend.kernels.finite import broken_vectors

_LOWEST = torch.finfo(torch.float32).min

_SCORE_BYTES = {"cpu": 8 << 20, "cuda": 128 << 20}
"""Bound on the scores that exist at once, unless those of one query of each row exceed it."""


class BlockedAttention:
    """The attention of some queries, whatever their dtype in fp32: `add` every block of keys, then take the `result`.

    What is not finite at a hidden place does not reach the query that it is hidden from.
    """

    def __init__(
        self, q: Tensor, kv_heads: int, *, scale: float, softcap: float = 0.0, sinks: Tensor | None = None
    ) -> None:
        """q [rows, queries, heads, head_dim]. softcap, sinks [heads]: see AttentionVariant and StepAttention."""
        rows, queries, heads, dim = q.shape
        self._dtype, self._heads, self._softcap = q.dtype, heads, softcap
        grouped = q.float().view(rows, queries, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
        grouped = grouped * (scale / softcap if softcap else scale)
        self._q = grouped.contiguous()  # [rows, kv_heads, group, queries, head_dim]
        state = self._q.shape[:-1]
        # A sink is a key seen already: it has a score, and adds nothing to the values.
        scores = q.new_full((heads,), -torch.inf, dtype=torch.float32) if sinks is None else sinks.float()
        most = scores.clamp(min=_LOWEST)  # finite before the first key that is seen: -inf less -inf is not a number
        self._most = most.view(kv_heads, -1, 1).expand(state).contiguous()
        self._total = (scores - most).exp_().view(kv_heads, -1, 1).expand(state).contiguous()
        self._out = torch.zeros_like(self._q)

    def add(self, queries: slice, k: Tensor, v: Tensor, hidden: Tensor | None) -> None:
        """k, v [rows, places, kv_heads, head_dim]: seen by none but `queries`, and by each of these where `hidden`
        (bool [rows, queries or 1, places]) is false; None: everywhere. Each pair of query and key at most once.
        Takes over k and v, which may be mutated.
        """
        rows, places, _, _ = k.shape
        k, v = k.float(), v.float()
        if hidden is not None:  # its weight will be 0, and 0 · NaN is NaN: the score tells of it to those who see it
            broken = broken_vectors(v)
            k.masked_fill_(broken, torch.nan)
            v.masked_fill_(broken, 0.0)
        step = max(_SCORE_BYTES[k.device.type] // (4 * rows * self._heads * places), 1)
        for start in range(queries.start, queries.stop, step):
            piece = slice(start, min(start + step, queries.stop))
            at = slice(piece.start - queries.start, piece.stop - queries.start)
            self._add(piece, k, v, hidden if hidden is None or hidden.shape[1] == 1 else hidden[:, at])

    def _add(self, queries: slice, k: Tensor, v: Tensor, hidden: Tensor | None) -> None:
        q = self._q[:, :, :, queries]
        shape = q.shape[:-1]
        scores = torch.matmul(q.flatten(2, 3), k.permute(0, 2, 3, 1)).view(*shape, -1)
        if self._softcap:
            scores.tanh_().mul_(self._softcap)
        if hidden is not None:
            scores.masked_fill_(hidden[:, None, None], -torch.inf)
        before = self._most[..., queries]
        most = torch.maximum(before, scores.amax(-1))
        weights = scores.sub_(most.unsqueeze(-1)).exp_()
        shrink = torch.exp(before - most)
        self._most[..., queries] = most
        self._total[..., queries].mul_(shrink).add_(weights.sum(-1))
        values = torch.matmul(weights.flatten(2, 3), v.transpose(1, 2)).view_as(q)
        self._out[..., queries, :].mul_(shrink.unsqueeze(-1)).add_(values)

    def result(self) -> Tensor:
        """[rows, queries, heads, head_dim] of q's dtype, new. Nothing may be added afterwards."""
        out = self._out.div_(self._total.unsqueeze(-1))
        return out.permute(0, 3, 1, 2, 4).flatten(2, 3).to(self._dtype)
