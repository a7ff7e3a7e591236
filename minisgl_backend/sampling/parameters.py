"""Sampling parameters as columns: one entry per slot, so that a step takes its rows by index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl_backend.messages.sampling import NO_LOGPROBS, Sampling


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Host arrays, [slots] in the worker's state or [rows] for a step. Meaning of the values: messages.Sampling."""

    temperature: npt.NDArray[np.float64]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    seed: npt.NDArray[np.uint64]
    sample_index: npt.NDArray[np.uint64]
    logprobs: npt.NDArray[np.int64]
    prompt_logprobs: npt.NDArray[np.int64]

    @classmethod
    def greedy(cls, slots: int) -> SamplingColumns:
        """Every slot greedy."""
        return cls(
            temperature=np.zeros(slots, np.float64),
            top_k=np.zeros(slots, np.int64),
            top_p=np.ones(slots, np.float64),
            min_p=np.zeros(slots, np.float64),
            seed=np.zeros(slots, np.uint64),
            sample_index=np.zeros(slots, np.uint64),
            logprobs=np.full(slots, NO_LOGPROBS, np.int64),
            prompt_logprobs=np.full(slots, NO_LOGPROBS, np.int64),
        )

    def put(self, slot: int, sampling: Sampling) -> None:
        """Writes one slot's entry."""
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.seed[slot] = sampling.seed
        self.sample_index[slot] = sampling.sample_index
        self.logprobs[slot] = sampling.logprobs
        self.prompt_logprobs[slot] = sampling.prompt_logprobs

    def take(self, rows: npt.NDArray[Any]) -> SamplingColumns:
        """Copies the entries of `rows` (indices or a mask), in that order."""
        return SamplingColumns(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.seed[rows],
            self.sample_index[rows],
            self.logprobs[rows],
            self.prompt_logprobs[rows],
        )
