"""One of the n answers of a request: its tokens in, its text and logprobs out, until it ends.

Where it stands in the flow: owned by the request's record (`text/record.py`). Tokens pass the detokeniser, then the
stop strings. Without stop strings they pile up and are read when somebody takes the piece; with them each is read as
it comes, since it may be the last.
Reasoning and tool calls (parse_output) are read last, of what the stop strings left; of an answer that is not streamed
a little at a time too, since nobody should wait for its end.

A stop string ends the answer with the token that completes it. That token is the last of the answer's ids, logprobs
and usage, also where its text is cut in part or whole.
"""

from __future__ import annotations

from array import array
from collections import deque
from io import StringIO

import msgspec

from minisgl_backend.messages.client import Chunk, FinishReason
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.messages.plan import Logprobs
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.text.detokenizer import Detokenizer
from minisgl_backend.text.logprobs import Row, joined, own_logprob, row_json, rows
from minisgl_backend.text.parsing import OutputReader
from minisgl_backend.text.stops import StopFinder
from minisgl_backend.text.tokenizer import Tokenizer

_READ_AHEAD_CHARS = 256
"""Of an answer that is not streamed: parsed at its end in one go, 40,000 characters took a fifth of a second."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of an answer are read."""

    stop_token_ids: frozenset[int]  # one of them is the last token
    show_stop: bool  # the stop string or token that ended the answer is shown
    min_tokens: int  # no stop string ends within the text of so many
    computes_logprobs: bool  # every token comes with a row
    tells_logprobs: bool  # and the client reads them


class Sample:
    """Owned by one record."""

    __slots__ = (
        "_ahead",
        "_detokenizer",
        "_eager",
        "_finder",
        "_fresh",
        "_logprob",
        "_logprobs",
        "_reader",
        "_reading",
        "_text",
        "_tokenizer",
        "_told",
        "num_tokens",
        "reason",
        "taken",
    )

    def __init__(
        self,
        reading: Reading,
        tokenizer: Tokenizer,
        detokenizer: Detokenizer,
        finder: StopFinder | None,
        prefix: str,
        reader: OutputReader | None = None,
    ) -> None:
        """prefix: text in front of the answer. reader: of reasoning and tool calls; None: they are text."""
        self.num_tokens = 0
        self.reason: FinishReason | None = None  # set: the answer has ended
        self.taken = False  # its last piece was taken
        self._reading = reading
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._finder = finder
        self._reader = reader
        self._ahead = finder is not None or (reader is not None and reader.whole)  # text is read as tokens come
        self._eager = self._ahead or reading.computes_logprobs  # each token is read as it comes
        self._text = StringIO()  # not taken yet; a string would be copied whole for each token
        self._text.write(prefix)
        self._fresh: array[int] = array("i")  # tokens not taken yet; without a finder not read yet either
        self._told: deque[Row] = deque()  # of tokens that have not come yet
        self._logprob = 0.0  # sum of those of the fresh tokens, where they are computed
        self._logprobs: list[bytes] = []  # JSON of each of the fresh tokens, where the client reads it

    @property
    def has_news(self) -> bool:
        """There is a piece to take."""
        return not self.taken and (bool(self._fresh) or self.reason is not None)

    def on_logprobs(self, told: Logprobs) -> None:
        """Of tokens that come next. Ignored once ended."""
        if self.reason is None:
            self._told.extend(rows(told))

    def on_token(self, token: int) -> None:
        """Ignored once ended: the scheduler may be some steps ahead."""
        if self.reason is not None:
            return
        self._fresh.append(token)
        self.num_tokens += 1
        if self._eager:
            self._read(token)

    def on_end(self, reason: FinishReason) -> None:
        """No more tokens. Ignored once ended."""
        if self.reason is not None:
            return
        self.reason = reason
        if self._ahead:
            held = "" if self._finder is None else self._finder.finish()
            self._text.write(held + self._detokenizer.finish())

    def take(self, request: RequestId, index: int) -> Chunk:
        """What is fresh; after the end the last piece."""
        fresh, self._fresh = self._fresh, array("i")
        text = self._take_text()
        if not self._ahead:
            shown = fresh if not fresh or self._is_shown(fresh[-1]) else fresh[:-1]
            text += self._detokenizer.push(shown)
            if self.reason is not None:
                text += self._detokenizer.finish()
        self.taken = self.reason is not None
        reasoning, calls = "", b""
        if self._reader is not None:
            parsed = self._reader.read(text, last=self.taken)
            text, reasoning, calls = parsed.content, parsed.reasoning, parsed.tool_calls
        logprobs = joined(self._logprobs) if self._reading.tells_logprobs else b""
        logprob, self._logprob, self._logprobs = self._logprob, 0.0, []
        return Chunk(request, text, pack_tokens(fresh), index, self.reason, logprobs, logprob, reasoning, calls)

    def _read(self, token: int) -> None:
        """What can not wait until the piece is taken."""
        if self._reading.computes_logprobs:
            row = self._told.popleft()
            self._logprob += own_logprob(row)
            if self._reading.tells_logprobs:
                self._logprobs.append(row_json(row, self._tokenizer))
        if not self._ahead or not self._is_shown(token):
            return
        text = self._detokenizer.push((token,))
        if self._finder is not None:
            text, stopped = self._finder.push(text, may_stop=self.num_tokens > self._reading.min_tokens)
            if stopped:
                self.reason = FinishReason.STOP
        self._text.write(text)
        if self._reader is not None and self._reader.whole and self._text.tell() >= _READ_AHEAD_CHARS:
            self._reader.read_ahead(self._take_text())

    def _take_text(self) -> str:
        text = self._text.getvalue()
        if text:
            self._text = StringIO()
        return text

    def _is_shown(self, token: int) -> bool:
        """A stop token ends the sequence, so it can only be the last; it counts, but is mostly not shown."""
        return self._reading.show_stop or token not in self._reading.stop_token_ids
