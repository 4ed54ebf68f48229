"""A request under way: what ends it early, and how often it may be sent."""

from __future__ import annotations

import email.utils
import random
import threading
import time
from collections.abc import Callable

import httpx

from ..errors import InvalidRequestError

__all__ = ["Aborted", "Call", "Calls", "retry_delay"]

_FIRST_DELAY_S, _MAX_DELAY_S = 0.25, 8.0
# A server that asks for more is reported as busy instead: nobody should wait so long without knowing it.
_MAX_RETRY_AFTER_S = 60.0


class Aborted(Exception):
    """The call was aborted; never leaves this package."""


class Call:
    """One request from its first sending to the end of its answer; ``abort`` may come from any thread."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.aborted = threading.Event()
        # Re-entrant: the garbage collector may end a dropped stream while its own thread holds the lock.
        self._lock = threading.RLock()
        self._interrupt: Callable[[], None] | None = None

    def abort(self) -> None:
        """End the call now, if it has not ended."""
        with self._lock:
            self.aborted.set()
            if self._interrupt is not None:
                self._interrupt()

    def interruptible_by(self, interrupt: Callable[[], None] | None) -> None:
        """Say what makes the call's wait end; None while there is none. It runs under a lock and must not block.

        Raises:
            Aborted: The call was aborted before.
        """
        with self._lock:
            self._interrupt = interrupt
            if interrupt is not None and self.aborted.is_set():
                raise Aborted

    def check(self) -> None:
        """Raise ``Aborted`` if the call was aborted."""
        if self.aborted.is_set():
            raise Aborted


class Calls:
    """The calls under way, by request id."""

    def __init__(self) -> None:
        # Re-entrant: the garbage collector may end a dropped stream while its own thread holds the lock.
        self._lock = threading.RLock()
        self._calls: dict[str, Call] = {}

    def begin(self, request_id: str) -> Call:
        """Note a new call.

        Raises:
            InvalidRequestError: One of that id is under way.
        """
        call = Call(request_id)
        with self._lock:
            if request_id in self._calls:
                raise InvalidRequestError(f"request_id {request_id!r} is in flight already", param="request_id")
            self._calls[request_id] = call
        return call

    def end(self, call: Call) -> None:
        with self._lock:
            if self._calls.get(call.request_id) is call:
                del self._calls[call.request_id]

    def abort(self, request_id: str) -> None:
        """Abort the call of that id; nothing happens if there is none."""
        with self._lock:
            call = self._calls.get(request_id)
        if call is not None:
            call.abort()

    def abort_all(self) -> None:
        with self._lock:
            calls = list(self._calls.values())
        for call in calls:
            call.abort()


def retry_delay(outcome: httpx.Response | httpx.TransportError, num_retries: int, max_retries: int) -> float | None:
    """Seconds until the request may be sent again; None if it must not be.

    It is sent again only if the first copy cannot be running: no connection was made, or the server refused the
    request because it is busy and said when to come back. In all other cases the server may be working on it.

    Args:
        outcome: What became of it.
        num_retries: How often it was sent again already.
    """
    if num_retries >= max_retries:
        return None
    # Half of it at random: clients that failed together should not come back together.
    delay = min(_FIRST_DELAY_S * 2**num_retries, _MAX_DELAY_S) * (0.5 + random.random() / 2)
    if isinstance(outcome, httpx.Response):
        asked = _retry_after(outcome) if outcome.status_code == httpx.codes.SERVICE_UNAVAILABLE else None
        return None if asked is None or asked > _MAX_RETRY_AFTER_S else max(asked, delay)
    return delay if isinstance(outcome, (httpx.ConnectError, httpx.ConnectTimeout)) else None


def _retry_after(response: httpx.Response) -> float | None:
    """``Retry-After`` in seconds, from either of its two forms."""
    value = response.headers.get("retry-after", "").strip()
    if value.isdecimal() and len(value) < 10:
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None
