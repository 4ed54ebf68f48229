"""The time that a call may take: who exceeds it is aborted in the engine, not just waited for no longer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from pagedllm.api import Engine, GenerateRequest
from pagedllm.errors import PagedLLMError

from .errors import RequestTimeoutError

__all__ = ["ABORT_INTERVAL_S", "ABORT_TRIES", "Deadline", "abort_all", "loop_time_limit", "time_limit"]

# An abort may come before the engine has seen the request; it is repeated for a second.
ABORT_INTERVAL_S, ABORT_TRIES = 0.05, 20


class Deadline:
    """The deadline of one call."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self.expired = False

    def check(self, finish_reason: str | None) -> None:
        """Raise if it was this deadline that aborted the request."""
        # A request that ended otherwise was in time, whatever the clock says by now.
        if self.expired and finish_reason == "abort":
            raise RequestTimeoutError(f"no answer within timeout={self.timeout:g} s; the request was aborted")


@contextmanager
def time_limit(engine: Engine, requests: Sequence[GenerateRequest], timeout: float | None) -> Iterator[Deadline]:
    """Abort the requests from another thread if the block takes longer: the engine's sync methods block this one."""
    deadline, done = Deadline(timeout), threading.Event()

    def watch() -> None:
        if done.wait(timeout):
            return
        deadline.expired = True
        for _ in range(ABORT_TRIES):
            abort_all(engine, requests)
            if done.wait(ABORT_INTERVAL_S):
                return

    if timeout is not None:
        threading.Thread(target=watch, name="pagedllm-timeout", daemon=True).start()
    try:
        yield deadline
    finally:
        done.set()


@contextmanager
def loop_time_limit(engine: Engine, requests: Sequence[GenerateRequest], timeout: float | None) -> Iterator[Deadline]:
    """Abort the requests from the running event loop if the block takes longer."""
    deadline, loop = Deadline(timeout), asyncio.get_running_loop()
    handle: asyncio.TimerHandle | None = None

    def expire(tries_left: int) -> None:
        nonlocal handle
        deadline.expired = True
        abort_all(engine, requests)
        if tries_left:
            handle = loop.call_later(ABORT_INTERVAL_S, expire, tries_left - 1)

    if timeout is not None:
        handle = loop.call_later(timeout, expire, ABORT_TRIES)
    try:
        yield deadline
    finally:
        if handle is not None:
            handle.cancel()


def abort_all(engine: Engine, requests: Sequence[GenerateRequest]) -> None:
    """Abort requests; those that the engine does not know, or no longer, are passed over."""
    # An engine that cannot abort has failed, and tells so to whoever waits for the answer.
    with suppress(PagedLLMError):
        for request in requests:
            engine.abort(request.request_id)
