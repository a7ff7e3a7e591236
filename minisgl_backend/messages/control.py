"""Start-up handshake and end of the processes of one engine group (scheduler and workers), and their host.

child ── Ready ──►  host          when its inbox is bound and (worker) its model is loaded and warmed up
scheduler ◄── Begin ──  host      when every child is Ready: only now may the scheduler plan
scheduler ── Late ──►  host       a step takes too long: the host writes down what it can see, and ends the group
child ── Broken ─►  host          an uncaught error; the process then exits
child ◄── Halt ───  host          end of the group
"""

from __future__ import annotations

import msgspec


class Loading(msgspec.Struct, frozen=True, array_like=True, tag="loading"):
    """Progress of a start, for the operator."""

    role: str  # "scheduler", "worker-0", …
    line: str


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """A child can receive."""

    role: str
    pid: int
    num_pages: int  # KV pages this rank holds; 0 from the scheduler


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """To the scheduler: every receiver has answered. Workers need no word: whatever reaches them is meant for them,
    and a plan may overtake a message of another sender.
    """

    num_pages: int  # the smallest pool of all ranks: what the scheduler may hand out
    context_tokens: int  # prompt + output of one sequence


class Broken(msgspec.Struct, frozen=True, array_like=True, tag="broken"):
    """A child ends because of an error."""

    role: str
    message: str  # one line, may name paths: for the log only
    fatal: bool  # True: starting again can not help (wrong model, wrong setting)
    exit_code: int  # of the StartError when fatal, else 1


class Late(msgspec.Struct, frozen=True, array_like=True, tag="late"):
    """The workers owe the result of a step for longer than they may."""

    step: int
    waited_s: float
    plans: tuple[str, ...]  # the last ones, a line each: rows and lengths, never a token


class Halt(msgspec.Struct, frozen=True, array_like=True, tag="halt"):
    """Stop after the present step."""


ToChild = Begin | Halt
FromChild = Loading | Ready | Late | Broken
