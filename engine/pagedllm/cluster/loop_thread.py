"""An event loop in a thread of its own.

Calls to replicas are made there, whichever thread or loop asks. Serve gives calls that are made while it handles a
request the identity of that request, and its router takes two of one identity for one and never sends the other. Here
no request is handled: nothing of the caller's context is taken along.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from ..errors import EngineClosedError

__all__ = ["LoopThread"]

_Value = TypeVar("_Value")


class LoopThread:
    """Runs coroutines for other threads until it is closed."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, _Value]) -> Future[_Value]:
        """Start a coroutine; the future gets its result.

        Raises:
            EngineClosedError: The thread has ended.
        """
        try:
            return contextvars.Context().run(asyncio.run_coroutine_threadsafe, coroutine, self._loop)
        except RuntimeError as error:
            coroutine.close()
            raise EngineClosedError("the engine was closed") from error

    def post(self, function: Callable[[], Any]) -> None:
        """Call a function soon; nothing happens when the thread has ended. The garbage collector may call this."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, context=contextvars.Context())

    def close(self) -> None:
        """Cancel what runs, and wait for the end."""
        self.post(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self._loop.close()
