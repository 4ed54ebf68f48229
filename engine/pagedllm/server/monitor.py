"""Watches the engine from outside: whether it lives, whether it moves, and its latest figures."""

from __future__ import annotations

import asyncio
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

from ..api import Engine, EngineStats, Health
from ..errors import PagedLLMError

__all__ = ["Monitor"]

_INTERVAL_S = 0.5
# Fixed texts: the route that shows them asks for no key.
_DEAD = "the engine has stopped"
_STUCK = "the engine does not finish its step"


class Monitor:
    """Asks the engine for its figures again and again; they come between two steps, so silence means that it is stuck.

    Args:
        stuck_after_s: How long a silence that is.
    """

    def __init__(self, engine: Engine, *, stuck_after_s: float) -> None:
        self.stats: EngineStats | None = None
        self._engine = engine
        self._stuck_after_s = stuck_after_s
        self._asked_at: float | None = None
        self._is_alive = True
        # An engine behind another URL may block; and other threads are busy with prompts.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pagedllm-health")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._pool.shutdown(wait=False, cancel_futures=True)

    def health(self) -> Health:
        """Whether requests can be served, as of the last look. Answers at once, however busy all others are."""
        if self._asked_at is not None and time.monotonic() - self._asked_at > self._stuck_after_s:
            return Health(ok=False, reason=_STUCK)
        return Health(ok=True) if self._is_alive else Health(ok=False, reason=_DEAD)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._asked_at = time.monotonic()
            self._is_alive = (await loop.run_in_executor(self._pool, self._engine.health)).ok
            with contextlib.suppress(PagedLLMError):  # what health() is there to tell
                self.stats = await self._engine.astats()
            self._asked_at = None
            await asyncio.sleep(_INTERVAL_S)
