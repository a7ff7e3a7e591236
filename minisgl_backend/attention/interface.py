"""What a model needs of attention: a backend that looks at a step's rows once, then serves every layer.

The worker calls `begin` once per step; the model calls `attend` of what it returns once per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from minisgl_backend.kernels.interface import HeadPreparation


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step, in plan order. Their tokens lie one row after another in the step's flat batch.

    starts, lengths: int64 on the host, [rows]: row i computes positions starts[i] … starts[i] + lengths[i] - 1.
    page_tables: int64 on the device, [rows, n]: page_tables[i, j] holds positions j · page_size and up of row i. n
    covers the longest row. Places past a row's end hold anything that is finite.
    """

    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    page_tables: Tensor


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """How one layer attends."""

    scale: float  # of q · k
    window: int = 0  # positions a token attends to, itself among them; 0: all up to itself
    softcap: float = 0.0  # scores become cap · tanh(score / cap) before masks and softmax; 0: they stay
    sinks: bool = False  # `attend` gets sinks


class StepAttention(Protocol):
    """Attention of one step; dropped when the step is done."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None = None,
        preparation: HeadPreparation | None = None,
    ) -> Tensor:
        """Prepares q and k, if there is a preparation, writes k and v of all rows into the layer's pages, then lets
        every row attend to its own positions.

        q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], all in the pool's dtype
        → [tokens, heads · head_dim]. Mutates the pool. sinks [heads]: a logit of each head that takes part in the
        softmax and has no value (gpt-oss, OpenAI 2025).

        What is not finite in one row is seen by no other row that does not read it. In a layer with a window, a cap or
        sinks it is not even seen by the row's own tokens that do not attend to it: a row that has left it behind ends
        well, and who reads the pages before it from the cache must find them sound.
        """
        ...


class AttentionBackend(Protocol):
    """One per worker; holds the pool it reads and writes."""

    def begin(self, rows: StepRows) -> StepAttention:
        """Builds once what all layers of a step share: places to write to; groups of rows and masks of each window."""
        ...


class DecodeStep(Protocol):
    """Decode rows over tensors that stay, so that a recording can be made of them."""

    def begin(self) -> StepAttention:
        """Begins the step, in the recording: what it computes on the device is computed again by each replay."""
        ...

    def refresh(self, starts: npt.NDArray[np.int64], page_tables: Tensor) -> None:
        """Before the recording and before each replay, outside of it: what the host must do for the rows that come.

        starts [rows]: where each row is now, on the host. page_tables: those of the step, filled already.
        """
        ...


@runtime_checkable
class RecordableAttention(AttentionBackend, Protocol):
    """A backend whose steps of decode rows can be recorded and replayed."""

    def decode_step(self, positions: Tensor, page_tables: Tensor) -> DecodeStep:
        """A step of decode rows alone: row i computes positions[i].

        positions [rows], page_tables [rows, n], int64, without gaps: the caller's, read again by each replay.
        """
        ...
