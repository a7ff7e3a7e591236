"""Between the text actor and the scheduler actor.

text ── Sequence, Samples, Abort, Probe, Look ──►  scheduler
text ◄── Progress, Gauges, View ────────────────  scheduler
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.messages.plan import Logprobs
from minisgl_backend.messages.sampling import Sampling


class EndReason(StrEnum):
    """Why the scheduler let a sequence go."""

    STOP = "stop"  # one of its stop_token_ids was sampled
    LENGTH = "length"  # max_new_tokens, the context limit or the pool's size is reached
    ABORT = "abort"  # confirms an Abort
    FAILED = "failed"  # the worker had no usable token for it: it fails alone
    DEADLINE = "deadline"  # its deadline has passed


class Sequence(msgspec.Struct, frozen=True, array_like=True, tag="sequence"):
    """A prompt to continue. Validated: 1 ≤ prompt length < context, max_new_tokens ≥ 1.

    One that outlived another engine group goes on where it was: its prompt then ends with what was sampled before.
    """

    id: SequenceId
    prompt: bytes  # packed int32
    sampling: Sampling
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]  # sorted; of the client, and the model's own unless ignore_eos
    priority: int = 0  # smaller runs earlier, under the policy `priority`
    deadline_s: float | None = None  # monotonic clock of this machine; None: none
    cache_salt: bytes = b""  # cached prefixes are shared only under the same salt
    num_outputs: int = 0  # so many of the last tokens of `prompt` were sampled already; not in max_new_tokens


class Samples(msgspec.Struct, frozen=True, array_like=True, tag="samples"):
    """Several answers to one prompt: sequences that differ in their ids and sample indices, each the next number."""

    first: Sequence
    count: int  # ≥ 2


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Lets a sequence go, in whatever state. Unknown and ended ids are ignored."""

    id: SequenceId


class Probe(msgspec.Struct, frozen=True, array_like=True, tag="probe"):
    """Asks for one Gauges."""


class Look(msgspec.Struct, frozen=True, array_like=True, tag="look"):
    """Asks for one View, which holds no more than this."""

    rows: int  # of the running sequences, and of the waiting ones
    nodes: int  # of the prefix tree
    edge_tokens: int  # of each node, from its begin; 0: nothing is told of the tokens


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """A sequence's only terminal event."""

    id: SequenceId
    reason: EndReason


class Started(msgspec.Struct, frozen=True, array_like=True):
    """Told with a sequence's first token, once, whatever happens to it later."""

    id: SequenceId
    cached_tokens: int  # of the prompt, found in the cache at its first admission
    planned_s: float  # monotonic: when its first row was planned


class Told(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of a sequence that asked. Of its prompt they may come again after a retraction, the same ones."""

    id: SequenceId
    logprobs: Logprobs


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """What one applied step (or one abort) brought. Columns: sequence_ids[i] got tokens[i], in plan order.

    A sequence that ends in this step has its last token (the stop token included) in the columns and itself in
    `ended`. Nothing is ever said of a sequence after its Ended.
    """

    sequence_ids: tuple[SequenceId, ...]
    tokens: tuple[int, ...]
    ended: tuple[Ended, ...]
    started: tuple[Started, ...] = ()
    logprobs: tuple[Told, ...] = ()  # of the tokens in the columns whose sequences ask, in that order
    prompt_logprobs: tuple[Told, ...] = ()  # before the sequence's first token


class Gauges(msgspec.Struct, frozen=True, array_like=True, tag="gauges"):
    """Answers Probe."""

    waiting: int
    running: int
    free_slots: int
    total_slots: int
    free_pages: int  # neither used nor cached
    total_pages: int
    steps: int  # planned since the start
    cached_pages: int = 0  # in the prefix cache, used by running sequences or not
    evictable_pages: int = 0  # of them, those that nobody uses at present
    matched_pages: int = 0  # found in the cache by admissions, since the start
    evicted_pages: int = 0  # since the start
    retractions: int = 0  # since the start


class RunningRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence that holds a slot."""

    id: SequenceId
    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the cache at its first admission
    output_tokens: int  # confirmed
    max_tokens: int  # of output
    pages: int  # of its table, the tree's among them
    extending: bool  # part of what it knew at its admission is not planned yet


class WaitingRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence that holds nothing."""

    id: SequenceId
    prompt_tokens: int
    priority: int


class TreeNode(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An edge of the prefix tree."""

    number: int  # its own as long as it lives; never given twice by one group
    parent: int  # number of the node above it; 0: none
    tokens: int
    locks: int  # sequences that use it at present
    unused_s: float  # since a step last read or wrote it, to a quarter of a second; 0 when locked
    edge: bytes  # packed int32: the first tokens, as many as were asked for


class View(msgspec.Struct, frozen=True, array_like=True, tag="view"):
    """Answers Look. What is left out is told by the counts."""

    gauges: Gauges
    quarantined_pages: int  # given up, but named by a step in flight
    prompt_tokens: int  # of all prompts admitted since the start, each once
    hit_tokens: int  # of them, found in the cache
    running: tuple[RunningRow, ...]  # those that extend first, each kind by arrival
    waiting: tuple[WaitingRow, ...]  # by arrival
    nodes: tuple[TreeNode, ...]  # parents before children: what is in use, then by last use
    total_nodes: int


TextToScheduler = Sequence | Samples | Abort | Probe | Look
SchedulerToText = Progress | Gauges | View
