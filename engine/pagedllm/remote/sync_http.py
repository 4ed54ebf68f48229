"""HTTP for threads: a bounded pool of connections, each of which another thread can cut off.

A thread that waits for an answer sits in a system call and can be reached only through its socket. Which socket serves
a request is known before the answer's head arrives only where there is no choice, so each connection is a client of
its own, called a lane.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx

from ..errors import EngineClosedError
from .calls import Aborted, Call, retry_delay
from .config import RemoteConfig
from .http_errors import transport_error
from .requests import KEEPALIVE_S, Outgoing, client_options, raise_for_status

__all__ = ["SyncHTTP"]


class SyncHTTP:
    """Sends requests from any number of threads.

    Args:
        config: Where to and how patiently.
    """

    def __init__(self, config: RemoteConfig) -> None:
        self._config = config
        self._pid = os.getpid()
        self._is_closed = False
        # Reading the certificates takes longer than all else here; all lanes share them.
        self._ssl_context: ssl.SSLContext | None = None
        self._changed = threading.Condition(threading.RLock())
        self._idle: list[_Lane] = []
        self._num_busy = 0

    @contextmanager
    def exchange(self, call: Call, outgoing: Outgoing) -> Iterator[httpx.Response]:
        """Send a request, again if that is safe, and hand out the head of its answer.

        The connection is cut off if the block is left before the answer's end, and by ``call.abort``.

        Raises:
            Aborted: The call was aborted.
            PagedLLMError: The server could not be reached, or answered with an error.
        """
        with self._lane(call) as lane:
            try:
                response = self._send(call, lane, outgoing)
                try:
                    raise_for_status(response)
                    yield response
                finally:
                    response.close()
            except httpx.HTTPError as error:
                call.check()  # the cut connection is what failed
                raise transport_error(error, self._config.base_url) from error

    def close(self) -> None:
        """Close the connections that are idle now, and the others when their requests end."""
        with self._changed:
            self._is_closed = True
            lanes, self._idle = self._idle, []
            self._changed.notify_all()
        for lane in lanes:
            lane.client.close()

    def _send(self, call: Call, lane: _Lane, outgoing: Outgoing) -> httpx.Response:
        num_retries = 0
        while True:
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = lane.send(call, outgoing)
                if outcome.is_success:
                    return outcome
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                outcome = error
            delay = retry_delay(outcome, num_retries, self._config.max_retries)
            if isinstance(outcome, httpx.Response):
                if delay is None:
                    return outcome
                outcome.close()
            elif delay is None:
                raise outcome
            if call.aborted.wait(delay):
                raise Aborted
            num_retries += 1

    @contextmanager
    def _lane(self, call: Call) -> Iterator[_Lane]:
        lane = self._take(call)
        try:
            call.interruptible_by(lane.cut)
            yield lane
        finally:
            call.interruptible_by(None)
            self._give_back(lane)

    def _take(self, call: Call) -> _Lane:
        with self._changed:
            if os.getpid() != self._pid:
                # A forked child must not write to its parent's connections, nor wait for threads it does not have.
                self._pid, self._idle, self._num_busy = os.getpid(), [], 0
            call.interruptible_by(self._wake)
            try:
                while self._num_busy >= self._config.max_connections and not self._is_closed:
                    self._changed.wait()
                    call.check()
            finally:
                call.interruptible_by(None)
            if self._is_closed:
                raise EngineClosedError("the engine was closed")
            lane = self._idle.pop() if self._idle else self._new_lane()
            self._num_busy += 1
            return lane

    def _new_lane(self) -> _Lane:
        self._ssl_context = self._ssl_context or httpx.create_ssl_context()
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=KEEPALIVE_S)
        return _Lane(httpx.Client(verify=self._ssl_context, limits=limits, **client_options(self._config)))

    def _give_back(self, lane: _Lane) -> None:
        lane.last_used = time.monotonic()
        with self._changed:
            self._num_busy = max(0, self._num_busy - 1)
            unwanted = []
            if self._is_closed or lane.is_cut:
                unwanted.append(lane)
            else:
                self._idle.append(lane)
                # The lane used last is taken first, so the first of the list is the one that waits longest.
                if lane.last_used - self._idle[0].last_used > KEEPALIVE_S:
                    unwanted.append(self._idle.pop(0))
            self._changed.notify()
        for each in unwanted:
            each.client.close()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class _Lane:
    """One connection, made when it is first needed; of no use after it was cut."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client
        self.last_used = 0.0
        self.is_cut = False
        self._socket: socket.socket | None = None

    def send(self, call: Call, outgoing: Outgoing) -> httpx.Response:
        def trace(event: str, info: dict[str, Any]) -> None:
            if event.endswith(("connect_tcp.complete", "start_tls.complete")):
                self._socket = info["return_value"].get_extra_info("socket")
            elif event.endswith("send_request_headers.started"):
                call.check()  # it may have been aborted before there was a socket to cut

        request = outgoing.build(self.client, trace=trace)
        response = self.client.send(request, stream=True)
        outgoing.head_arrived(request)
        return response

    def cut(self) -> None:
        """Wake whoever reads from the connection, with an error; any thread."""
        self.is_cut = True
        if self._socket is not None:
            # The plain socket's method: TLS's would take from the reader what it is using.
            with suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
