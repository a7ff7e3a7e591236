"""A request that the text actor has not answered for good."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass

from msgspec import structs

from minisgl_backend.actors.internal import HolderId
from minisgl_backend.messages.engine import Sequence
from minisgl_backend.messages.ids import RequestId, SequenceId
from minisgl_backend.messages.sampling import NO_LOGPROBS
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.text.record import Record
from minisgl_backend.text.request import Accepted


@dataclass(slots=True)
class Memory:
    """What is kept of a request so that another engine group can go on with it (resume_on_restart)."""

    accepted: Accepted
    outputs: tuple[array[int], ...]  # tokens of each answer so far
    deaths: int = 0  # of groups, one after another, that had it in work and gave it no token
    progressed: bool = False  # it got a token of the present group

    @staticmethod
    def of(accepted: Accepted) -> Memory:
        return Memory(accepted, tuple(array("i") for _ in range(accepted.num_samples)))

    def keep(self, token: int, index: int) -> None:
        """A token of an answer."""
        self.outputs[index].append(token)
        self.progressed = True

    def survive(self) -> None:
        """The group that had it in work died. Who got a token of that group is not suspected."""
        self.deaths = 0 if self.progressed else self.deaths + 1
        self.progressed = False

    def rest(self, first: SequenceId, index: int, arrived_s: float) -> Sequence:
        """What is still to do for an answer. first: the id of the first one's sequence."""
        outputs = self.outputs[index]
        whole = self.accepted.sequence(SequenceId(first + index), arrived_s)
        prompt_logprobs = whole.sampling.prompt_logprobs if index == 0 else NO_LOGPROBS
        return structs.replace(
            whole,
            prompt=whole.prompt + pack_tokens(outputs),
            sampling=structs.replace(whole.sampling, sample_index=index, prompt_logprobs=prompt_logprobs),
            max_new_tokens=whole.max_new_tokens - len(outputs),
            num_outputs=len(outputs),
        )


@dataclass(slots=True, eq=False)
class OpenRequest:
    """Owned by the text actor. `record` is None while its prompt is being tokenised.

    Its n answers are the sequences with the ids `sequence` … `sequence` + n - 1.
    """

    holder: HolderId
    request: RequestId
    sequence: SequenceId
    arrived_s: float  # monotonic
    num_samples: int = 1
    record: Record | None = None
    tokenising: asyncio.Task[None] | None = None  # beside the loop
    memory: Memory | None = None  # None: it does not outlive an engine group

    @property
    def sequences(self) -> list[SequenceId]:
        """Of its answers, in their order."""
        return [SequenceId(self.sequence + index) for index in range(self.num_samples)]
