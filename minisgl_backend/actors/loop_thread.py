"""An event loop in a thread of its own, for callers that live in other threads: Triton's stub, a script.

    any thread ── call(function, …) ──►  the loop's thread: main(), then at_end(error)

What is called before the end still runs; what comes later is told so. Nothing is lost in between.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any


class LoopThread:
    """Runs `main` until it ends or `stop` cancels it, then calls `at_end` (in the thread) with its error, if any."""

    def __init__(
        self, name: str, main: Callable[[], Coroutine[Any, Any, None]], at_end: Callable[[BaseException | None], None]
    ) -> None:
        self._main = main
        self._at_end = at_end
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._ended = False  # guarded by _lock
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Once."""
        self._thread.start()

    def call(self, function: Callable[..., None], *arguments: object) -> bool:
        """Has `function` called in the loop, in the order of the calls. False when the loop has ended."""
        with self._lock:
            if not self._ended:
                self._loop.call_soon_threadsafe(function, *arguments)
            return not self._ended

    def stop(self) -> None:
        """Cancels `main` and waits until the thread has ended. Idempotent."""
        self.call(self._cancel)
        self._thread.join()

    def _cancel(self) -> None:
        if self._task is not None and not self._task.cancelling():  # a second cancel would break the clean-up
            self._task.cancel()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        error: BaseException | None = None
        try:
            self._task = self._loop.create_task(self._main())
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except BaseException as caught:
            error = caught
        finally:
            with self._lock:
                self._ended = True
            self._loop.run_until_complete(asyncio.sleep(0))  # the last calls that came in
            self._at_end(error)
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()
