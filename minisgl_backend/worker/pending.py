"""A step that was launched on a device which works by itself: what it brings is asked for later, or never."""

from __future__ import annotations

import threading
from collections.abc import Callable

from minisgl_backend.device.staging import Download
from minisgl_backend.device.streams import Event
from minisgl_backend.messages.ids import StepId
from minisgl_backend.messages.plan import Logprobs, StepResult

Told = tuple[tuple[Logprobs, ...], tuple[Logprobs, ...]]
"""Logprobs of what was sampled, and of prompts."""


class PendingStep:
    """See Pending. Any thread may ask, more than one at a time too."""

    def __init__(self, step: StepId, tokens: Download | Event, tell: Callable[[], Told]) -> None:
        """tokens: int64 [rows that sample]; an Event: there are none, and the step is over when it has been.

        tell: called once, when the tokens are there.
        """
        self._step = step
        self._source = tokens
        self._tell = tell
        self._told: Told | None = None
        self._lock = threading.Lock()
        self._tokens: tuple[int, ...] | None = None

    def tokens(self) -> tuple[int, ...]:
        """Waits for them; raises what went wrong on the device."""
        with self._lock:
            if self._tokens is None:
                if isinstance(self._source, Download):
                    self._tokens = tuple(self._source.tensor().tolist())
                else:
                    self._source.wait()
                    self._tokens = ()
            return self._tokens

    def result(self) -> StepResult:
        """See Pending."""
        tokens = self.tokens()
        with self._lock:
            if self._told is None:
                self._told = self._tell()
            sampled, prompts = self._told
        return StepResult(self._step, tokens, "", sampled, prompts)
