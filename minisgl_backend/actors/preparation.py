"""What of a request takes long, beside the text actor's loop: long prompts become tokens, forms become grammars.

Where it stands in the flow: the text actor hands over checked requests of this kind; what comes back is posted to its
inbox. Running streams keep their pace meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from minisgl_backend.actors.grammars import GrammarCompiler
from minisgl_backend.errors import RequestError, SequenceFailed
from minisgl_backend.messages.sampling import Grammar
from minisgl_backend.text import operations
from minisgl_backend.text.limits import RequestLimits
from minisgl_backend.text.prompt import is_client_code, takes_long
from minisgl_backend.text.request import Accepted, Checked, answer_form, tokenise
from minisgl_backend.text.tokenizer import Tokenizer

_LONG_THREADS = 2
"""For long prompts and large forms. More would only take the cores that the model computes on."""

_CLIENT_CODE_THREADS = 2
"""For prompts whose templates clients wrote: those wait for one another, and nobody else's prompt for them."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


def is_long(checked: Checked) -> bool:
    """Whether a request is to be prepared here; any other by `tokenise_now`, at once."""
    return checked.may_have_form or takes_long(checked.prompt)


def tokenise_now(checked: Checked, tokenizer: Tokenizer, limits: RequestLimits) -> Accepted:
    """Raises as `tokenise`."""
    return tokenise(checked, tokenizer, limits, _draw_seed)


class Preparation:
    """Owns the threads and the processes that compile grammars. Called from the loop of the text actor."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        """tasks: what goes on when those who asked for it have left."""
        self._tasks = tasks
        self._grammars: GrammarCompiler | None = None  # made for the first that is asked for
        self._long = ThreadPoolExecutor(_LONG_THREADS, "minisgl-tokenise")
        self._client_code = ThreadPoolExecutor(_CLIENT_CODE_THREADS, "minisgl-client-template")

    async def prepare(self, checked: Checked, tokenizer: Tokenizer, limits: RequestLimits) -> Accepted | RequestError:
        """What can not be accepted is returned with its reason. Cancelled, it leaves the queue for a thread."""
        try:
            grammar = await self._grammar(checked, tokenizer) if checked.may_have_form else None
        except Exception as error:
            return _reason(error)
        client_code = is_client_code(checked.prompt)
        return await self._in_thread(client_code, tokenise, checked, tokenizer, limits, _draw_seed, grammar)

    async def work_out(
        self, operation: operations.Operation, tokenizer: Tokenizer, limits: RequestLimits
    ) -> bytes | RequestError:
        """The result of an operation; else as `prepare`."""
        client_code = operations.is_client_code(operation)
        return await self._in_thread(client_code, operations.result_of, operation, tokenizer, limits)

    def close(self) -> None:
        for threads in (self._long, self._client_code):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._grammars is not None:
            self._grammars.close()

    async def _in_thread(self, client_code: bool, work: Callable[..., T], *arguments: Any) -> T | RequestError:
        threads = self._client_code if client_code else self._long
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, work, *arguments)
        except Exception as error:
            return _reason(error)

    async def _grammar(self, checked: Checked, tokenizer: Tokenizer) -> Grammar | None:
        form = await asyncio.get_running_loop().run_in_executor(self._long, answer_form, checked, tokenizer)
        if form is None:
            return None
        if self._grammars is None:
            token_bytes = tokenizer.shown_bytes[: tokenizer.vocab_size]
            self._grammars = GrammarCompiler(token_bytes, tokenizer.shown_digest, self._tasks)
        return await self._grammars.compile(*form)


def _reason(error: Exception) -> RequestError:
    """What the client is told."""
    if isinstance(error, RequestError):
        return error
    _log.error("tokenising failed", exc_info=error)
    return SequenceFailed("the prompt could not be tokenised")


def _draw_seed() -> int:
    return secrets.randbits(63)
