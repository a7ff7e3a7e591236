"""How one sequence draws its tokens: the resolved form that crosses text → scheduler → worker."""

from __future__ import annotations

import msgspec


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """Validated by `text/`; nothing here can make a worker raise.

    A token is a pure function of (logits, seed, sample_index, position), so `seed` is always set: the text actor
    draws one for requests that named none.
    """

    temperature: float  # 0 is greedy; otherwise > 0 and finite
    top_k: int  # 0 is no limit; otherwise 1 … vocabulary size
    top_p: float  # in (0, 1]; 1 is no limit
    seed: int  # 0 … 2**63 - 1
    sample_index: int  # which of the n samples of its request; 0 while n is 1


GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, sample_index=0)
