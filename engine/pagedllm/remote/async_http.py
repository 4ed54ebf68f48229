"""HTTP for event loops: one client in each loop, which ends with the loop."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx

from ..errors import EngineClosedError
from .calls import retry_delay
from .config import RemoteConfig
from .http_errors import transport_error
from .requests import KEEPALIVE_S, Outgoing, araise_for_status, client_options

__all__ = ["AsyncHTTP"]

_Holder = AsyncGenerator[httpx.AsyncClient, None]


class AsyncHTTP:
    """Sends requests from any number of event loops.

    Args:
        config: Where to and how patiently.
    """

    def __init__(self, config: RemoteConfig) -> None:
        self._config = config
        self._is_closed = False
        self._lock = threading.RLock()
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[int, httpx.AsyncClient, _Holder]] = (
            weakref.WeakKeyDictionary()
        )
        # A loop refers to its tasks only weakly.
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def exchange(self, outgoing: Outgoing) -> AsyncIterator[httpx.Response]:
        """Send a request, again if that is safe, and hand out the head of its answer.

        The connection is closed if the block is left before the answer's end; cancelling ends any wait.

        Raises:
            PagedLLMError: The server could not be reached, or answered with an error.
        """
        client = await self._client()
        try:
            response = await self._send(client, outgoing)
            try:
                await araise_for_status(response)
                yield response
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise transport_error(error, self._config.base_url) from error

    async def aclose(self) -> None:
        """Close the clients of all loops: this loop's now, the others' in their loops."""
        here = asyncio.get_running_loop()
        for loop, holder in self._take_all():
            if loop is here:
                await holder.aclose()
            else:
                self._close_in(loop, holder)

    def close(self) -> None:
        """As ``aclose``, without waiting."""
        for loop, holder in self._take_all():
            self._close_in(loop, holder)

    def _take_all(self) -> list[tuple[asyncio.AbstractEventLoop, _Holder]]:
        with self._lock:
            self._is_closed = True
            holders = [(loop, holder) for loop, (_, _, holder) in self._clients.items()]
            self._clients.clear()
        return holders

    def _close_in(self, loop: asyncio.AbstractEventLoop, holder: _Holder) -> None:
        def start() -> None:
            task = loop.create_task(_close(holder))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

        with suppress(RuntimeError):  # the loop is closed, and its client with it
            loop.call_soon_threadsafe(start)

    async def _client(self) -> httpx.AsyncClient:
        loop, pid = asyncio.get_running_loop(), os.getpid()
        with self._lock:
            if self._is_closed:
                raise EngineClosedError("the engine was closed")
            found = self._clients.get(loop)
        if found is not None and found[0] == pid:
            return found[1]
        holder = _hold_client(self._config)
        # The generator runs up to its yield without suspending, so no other task of this loop comes between.
        client = await anext(holder)
        with self._lock:
            self._clients[loop] = (pid, client, holder)
        return client

    async def _send(self, client: httpx.AsyncClient, outgoing: Outgoing) -> httpx.Response:
        num_retries = 0
        while True:
            outcome: httpx.Response | httpx.TransportError
            try:
                request = outgoing.build(client)
                outcome = await client.send(request, stream=True)
                outgoing.head_arrived(request)
                if outcome.is_success:
                    return outcome
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                outcome = error
            delay = retry_delay(outcome, num_retries, self._config.max_retries)
            if isinstance(outcome, httpx.Response):
                if delay is None:
                    return outcome
                await outcome.aclose()
            elif delay is None:
                raise outcome
            await asyncio.sleep(delay)
            num_retries += 1


async def _hold_client(config: RemoteConfig) -> _Holder:
    """A client for as long as the generator lives.

    An event loop that ends in order (``asyncio.run``, every framework's runner) closes the asynchronous generators that
    began in it, and asks its loop to close those that are collected: so the client ends with its loop, or with us.
    """
    limits = httpx.Limits(max_connections=config.max_connections, keepalive_expiry=KEEPALIVE_S)
    client = httpx.AsyncClient(limits=limits, **client_options(config))
    try:
        yield client
    finally:
        await client.aclose()


async def _close(holder: _Holder) -> None:
    await holder.aclose()
