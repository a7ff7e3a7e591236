"""What a worker remembers of each slot between steps: tokens, page table, sampling parameters, rules.

The scheduler sends only changes. Tokens live on the device: the one sampled in a step is read from here by the next,
without passing through the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.device.staging import Staging
from minisgl_backend.messages.plan import Admission, PageGrant
from minisgl_backend.messages.tokens import unpack_tokens
from minisgl_backend.sampling.masks import Rows
from minisgl_backend.sampling.parameters import SamplingColumns
from minisgl_backend.sampling.rules import RuleBook


class SlotState:
    """Owns the tensors; changed by `admit`, `grant`, `expect` and `store`, in that order within a step.

    What the host knows changes at once, tensors when the device comes to it.
    """

    def __init__(
        self,
        max_running: int,
        context_tokens: int,
        page_size: int,
        scratch_page: int,
        vocab: int,
        device: torch.device,
        staging: Staging,
    ) -> None:
        self.page_size = page_size
        self.vocab = vocab
        self.sampling = SamplingColumns.greedy(max_running)
        self._staging = staging
        self._context_tokens = context_tokens
        self._scratch_page = scratch_page
        max_pages = -(-context_tokens // page_size)
        self._tokens = torch.zeros(max_running, context_tokens, dtype=torch.int32, device=device)
        self._tables = torch.full((max_running, max_pages), scratch_page, dtype=torch.int32, device=device)
        self._page_counts = np.zeros(max_running, np.int64)  # pages in each slot's table
        self._known = np.zeros(max_running, np.int64)  # tokens of each slot
        self.output_starts = np.zeros(max_running, np.int64)  # of them, those before are the prompt that came at first
        self.rules = RuleBook(self._tokens, self.output_starts, vocab)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Begins a new life of each slot: one upload for all prompts."""
        if not admissions:
            return
        prompts = []
        for admission in admissions:
            slot, prompt = admission.slot, np.asarray(unpack_tokens(admission.prompt), np.int32)
            assert 0 < len(prompt) < self._context_tokens, f"slot {slot}: a prompt of {len(prompt)} tokens"
            prompts.append(prompt)
            self._page_counts[slot] = 0
            self._known[slot] = len(prompt)
            self.output_starts[slot] = len(prompt) - admission.num_outputs
            self.sampling.put(slot, admission.sampling)
            self.rules.put(slot, admission.sampling.rules)
        (tokens,) = self._staging.upload([np.concatenate(prompts)])
        lives = [(admission.slot, len(prompt)) for admission, prompt in zip(admissions, prompts, strict=True)]
        self._staging.streams.compute(lambda: self._begin_lives(lives, tokens))

    def grant(self, grants: Sequence[PageGrant]) -> None:
        """Appends pages to page tables: one upload for all."""
        slots: list[int] = []
        columns: list[int] = []
        pages: list[int] = []
        for grant in grants:
            count = int(self._page_counts[grant.slot])
            slots += [grant.slot] * len(grant.pages)
            columns += range(count, count + len(grant.pages))
            pages += grant.pages
            self._page_counts[grant.slot] = count + len(grant.pages)
        if pages:
            index, values = self._staging.upload([np.array([slots, columns]), np.array(pages, np.int32)])
            self._staging.streams.compute(lambda: self._tables.index_put_((index[0], index[1]), values))

    def check_rows(self, slots: Rows, starts: Rows, lengths: Rows) -> None:
        """Asserts what every plan promises: known tokens, room in the page table, no slot twice."""
        ends = starts + lengths
        assert (lengths >= 1).all() and (starts >= 0).all(), "a row without tokens"
        assert len(np.unique(slots)) == len(slots), "a slot in two rows"
        assert (ends <= self._known[slots]).all(), "a row computes a token that is not known"
        assert (ends <= self._page_counts[slots] * self.page_size).all(), "a row ends beyond its slot's pages"

    def tokens_at(self, slots: Tensor, positions: Tensor) -> Tensor:
        """slots, positions [n] int64 → token ids [n] int32."""
        return self._tokens[slots, positions]

    def tables_of(self, slots: Tensor, context_tokens: int) -> Tensor:
        """Page tables of the slots [rows] int64, as wide as the longest row needs: [rows, n] int64, a copy."""
        return self._tables[slots, : -(-context_tokens // self.page_size)].long()

    def expect(self, slots: Rows, positions: Rows) -> Rows:
        """From now on the tokens that are sampled at `positions` [rows] are known → for `store`, [3, n]: slot, position
        and row of each that is kept, those of a full context excepted.
        """
        room = np.flatnonzero(positions < self._context_tokens)
        self._known[slots] = np.minimum(positions + 1, self._context_tokens)
        return np.stack((slots[room], positions[room], room))

    def store(self, places: Tensor, tokens: Tensor) -> None:
        """Sampled tokens, int64 [rows]. places: what `expect` said, on the device.

        NO_TOKEN is stored as token 0: its sequence is over, but a step planned ahead may still read it.
        """
        self._tokens[places[0], places[1]] = tokens[places[2]].clamp(min=0).to(torch.int32)

    def _begin_lives(self, lives: Sequence[tuple[int, int]], tokens: Tensor) -> None:
        """lives: slot and length of each prompt, which lie one behind another in `tokens`."""
        begin = 0
        for slot, length in lives:
            self._tokens[slot, :length] = tokens[begin : begin + length]
            self._tables[slot].fill_(self._scratch_page)
            begin += length
