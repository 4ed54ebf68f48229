"""Run the application until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import uvicorn

from ..api import Engine
from ..errors import ConfigError
from .app import create_app
from .config import ServerConfig
from .metrics import Metrics
from .refusals import SHUTTING_DOWN
from .service import Service

__all__ = ["Server", "serving"]

logger = logging.getLogger(__name__)

# uvicorn's h11 parser refuses longer heads of requests.
_MAX_HEAD_BYTES = 64 << 10
_BACKLOG = 2048
# What an ended call gets to say so.
_LAST_WORDS_S = 2.0


class Server(uvicorn.Server):
    """Serves one engine on one address.

    The first SIGTERM or Ctrl-C stops taking requests and lets the running ones end within ``shutdown_timeout_s``; what
    is left then gets an error. A second one ends at once.

    Args:
        engine: Not closed here.
    """

    def __init__(self, engine: Engine, config: ServerConfig, *, metrics: Metrics | None = None) -> None:
        self.service = Service(engine, config, metrics)
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        super().__init__(
            uvicorn.Config(
                create_app(self.service),
                host=config.host,
                port=config.port,
                http="h11",
                ws="none",
                lifespan="on",
                loop="asyncio",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
                timeout_graceful_shutdown=int(config.shutdown_timeout_s + _LAST_WORDS_S + 1),
            )
        )

    def bind(self) -> str:
        """Take the address, so that its URL is known before serving.

        Raises:
            ConfigError: It cannot be had.
        """
        config = self.service.config
        try:
            info = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self._socket = _bound(info[0], info[4])
        except OSError as error:
            raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror or error}") from error
        port = self._socket.getsockname()[1]
        host = f"[{config.host}]" if ":" in config.host else config.host
        return f"http://{host}:{port}"

    def run_until_signal(self) -> None:
        """Serve; returns when a signal, or ``should_exit`` set from elsewhere, has ended it."""
        if self._socket is None:
            self.bind()
        assert self._socket is not None
        with contextlib.closing(self._socket):
            self.run(sockets=[self._socket])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the signals are not raised again at the end: they have done their work."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  uvicorn's signature
        """Note a signal: the first one drains, any further one ends at once."""
        if self.should_exit:
            self.force_exit = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._drop_connections)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then end what is left."""
        self.service.drain()
        if self.service.tenants.num_open:
            logger.info("waiting up to %g s for running requests", self.service.config.shutdown_timeout_s)
        ender = asyncio.get_running_loop().call_later(
            self.service.config.shutdown_timeout_s, self.service.end_all, SHUTTING_DOWN
        )
        try:
            await super().shutdown(sockets)
        finally:
            ender.cancel()

    def _drop_connections(self) -> None:
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


@contextlib.contextmanager
def serving(engine: Engine, config: ServerConfig) -> Iterator[tuple[str, Server]]:
    """Serve an engine from a thread of this process until the block ends; gives the server's root URL, and itself."""
    server = Server(engine, config)
    url = server.bind()
    thread = threading.Thread(target=server.run_until_signal, name="pagedllm-server")
    thread.start()
    try:
        yield url, server
    finally:
        server.should_exit = True
        thread.join()


def _bound(family: int, address: Any) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(_BACKLOG)  # whoever reads the URL may come at once, and waits until it is served
    except OSError:
        made.close()
        raise
    return made
