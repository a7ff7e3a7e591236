"""What one rank of several has of a model's shape (tensor parallelism). Pure, no torch.

Where it stands in the flow: asked before an engine starts, and when its workers load (sharding.py has the tensors).
Attention heads, the inner vectors of MLPs and experts, and the vocabulary are dealt out; norms and routers are on every
rank. A KV head is on several ranks where there are fewer than ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from minisgl_backend.config import Quantization
from minisgl_backend.errors import ConfigError
from minisgl_backend.models.spec import ModelSpec

_MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class Share:
    """One rank of several."""

    rank: int
    ranks: int

    def of(self, size: int) -> tuple[int, int]:
        """Of so many things in a row, this rank's: from, to. There are ranks · k of them."""
        part = size // self.ranks
        return self.rank * part, (self.rank + 1) * part

    def of_kv_heads(self, heads: int) -> tuple[int, int]:
        """As `of`; of fewer heads than ranks, the one that this rank's query heads read."""
        if heads >= self.ranks:
            return self.of(heads)
        head = self.rank * heads // self.ranks
        return head, head + 1

    def of_vocabulary(self, size: int) -> tuple[int, int]:
        """As `of`, for any size: the last ranks may have fewer, or none."""
        rows = vocabulary_rows(size, self.ranks)
        return min(self.rank * rows, size), min((self.rank + 1) * rows, size)


def vocabulary_rows(size: int, ranks: int) -> int:
    """Of the embedding and the head on every rank, those of nobody included."""
    return -(-size // ranks)


def check_ranks(spec: ModelSpec, ranks: int, quantization: Quantization = "none") -> None:
    """Raises ConfigError, with the degrees that do: the model can not be dealt out to so many."""
    if ranks == 1:
        return
    if quantization != "none":
        raise ConfigError(
            f"setting 'tensor_parallel' is {ranks}, but 'quantization' is {quantization!r}: quantised weights are not "
            "dealt out by this version; leave one of them at 1 or 'none'"
        )
    if not (obstacle := _obstacle(spec, ranks)):
        return
    fit = [str(degree) for degree in range(1, _MOST_RANKS + 1) if not _obstacle(spec, degree)]
    raise ConfigError(f"setting 'tensor_parallel' is {ranks}, but {obstacle}; this model takes {', '.join(fit)}")


def _obstacle(spec: ModelSpec, ranks: int) -> str:
    if spec.num_heads % ranks:
        return f"{spec.num_heads} query heads can not be dealt out evenly"
    if spec.num_kv_heads % ranks and ranks % spec.num_kv_heads:
        return f"{spec.num_kv_heads} KV heads can not be dealt out evenly"
    for name, size in _inner_sizes(spec).items():
        if size % ranks:
            return f"the {name} of {size} can not be dealt out evenly"
    return ""


def _inner_sizes(spec: ModelSpec) -> Mapping[str, int]:
    """Of the MLPs that there are."""
    sizes = {}
    if not all(layer.sparse for layer in spec.layers):
        sizes["intermediate_size"] = spec.intermediate_size
    if spec.moe is not None and any(layer.sparse for layer in spec.layers):
        sizes["intermediate_size of an expert"] = spec.moe.intermediate_size
        sizes["intermediate_size of the shared expert"] = spec.moe.shared_intermediate_size
    return sizes


def share_of(spec: ModelSpec, share: Share) -> ModelSpec:
    """The shape of a rank's part, with so many rows of the vocabulary as every rank has."""
    moe, ranks = spec.moe, share.ranks
    if moe is not None:
        moe = replace(
            moe,
            intermediate_size=moe.intermediate_size // ranks,
            shared_intermediate_size=moe.shared_intermediate_size // ranks,
        )
    return replace(
        spec,
        num_heads=spec.num_heads // ranks,
        num_kv_heads=max(spec.num_kv_heads // ranks, 1),
        intermediate_size=spec.intermediate_size // ranks,
        vocab_size=vocabulary_rows(spec.vocab_size, ranks),
        moe=moe,
    )
