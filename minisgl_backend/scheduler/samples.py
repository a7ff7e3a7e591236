"""The n answers of one request → the sequences that they are.

Where it stands in the flow: between the text actor's Samples and `Scheduler.add`. Said once, prompt and sampling cross
to the scheduler once, and the sequences share what they are made of. Pure.
"""

from __future__ import annotations

import msgspec

from minisgl_backend.messages.engine import Samples, Sequence
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.messages.sampling import NO_LOGPROBS, Sampling


def sequences_of(samples: Samples) -> list[Sequence]:
    """By index. The prompt's logprobs are those of the first alone: they are all the same."""
    first = samples.first
    rest = msgspec.structs.replace(first.sampling, prompt_logprobs=NO_LOGPROBS)
    return [first, *(_sequence(first, rest, index) for index in range(1, samples.count))]


def _sequence(first: Sequence, sampling: Sampling, index: int) -> Sequence:
    own = msgspec.structs.replace(sampling, sample_index=index)
    return msgspec.structs.replace(first, id=SequenceId(first.id + index), sampling=own)
