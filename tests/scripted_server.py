"""A server that answers by a script: as vLLM does, or as badly as a test wants."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["Exchange", "ScriptedServer", "chat_event", "until"]

Script = Callable[["Exchange"], None]


class Exchange:
    """One request and the means to answer it."""

    def __init__(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        self.path, self.headers, self.body = handler.path, handler.headers, body
        self._handler = handler

    def json(self, value: Any, status: int = 200, **headers: str) -> None:
        self.raw(json.dumps(value).encode(), status, **{"Content-Type": "application/json", **headers})

    def raw(self, data: bytes, status: int = 200, **headers: str) -> None:
        self._handler.send_response(status)
        for name, value in headers.items():
            self._handler.send_header(name.replace("_", "-"), value)
        self._handler.send_header("Content-Length", str(len(data)))
        self._handler.end_headers()
        self._handler.wfile.write(data)

    def begin_events(self, content_type: str = "text/event-stream") -> None:
        self._handler.send_response(200)
        self._handler.send_header("Content-Type", content_type)
        self._handler.send_header("Transfer-Encoding", "chunked")
        self._handler.end_headers()

    def event(self, value: Any) -> None:
        data = f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()
        self._handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def end_events(self) -> None:
        self._handler.wfile.write(b"0\r\n\r\n")

    def hang_up(self) -> None:
        self._handler.close_connection = True
        self._handler.connection.shutdown(socket.SHUT_RDWR)

    def wait_for_hang_up(self, seconds: float = 10.0) -> bool:
        """Whether the client closed the connection within the time."""
        ready, _, _ = select.select([self._handler.connection], [], [], seconds)
        self._handler.close_connection = True
        try:
            return bool(ready) and self._handler.connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True


class ScriptedServer:
    """Serves on a free port of the loopback; a context manager.

    Attributes:
        scripts: Path -> what answers; those of a list answer one request each, the last one all further ones.
        exchanges: All requests, in order.
        num_connections: Made so far.
    """

    def __init__(self, scripts: dict[str, Script | list[Script]], port: int = 0) -> None:
        self.scripts = scripts
        self.exchanges: list[Exchange] = []
        self.num_connections = 0
        self._httpd = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._httpd.daemon_threads = True
        self._thread = threading.Thread(target=self._httpd.serve_forever, args=(0.01,), daemon=True)

    @property
    def port(self) -> int:
        return self._httpd.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._httpd.shutdown()
        self._httpd.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                server.num_connections += 1

            def handle(self) -> None:
                try:
                    super().handle()
                except OSError:
                    self.close_connection = True  # the client has gone

            def do_GET(self) -> None:
                server._answer(self, None)

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                server._answer(self, json.loads(data))

            def log_message(self, *args: Any) -> None:
                pass

        return Handler

    def _answer(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        exchange = Exchange(handler, body)
        self.exchanges.append(exchange)
        script = self.scripts.get(handler.path)
        if isinstance(script, list):
            script = script.pop(0) if len(script) > 1 else script[0]
        if script is None:
            exchange.json({"detail": "Not Found"}, 404)
        else:
            script(exchange)


def chat_event(content: str, finish_reason: str | None = None) -> dict[str, Any]:
    """An event of a chat's stream as servers send it that know only OpenAI's fields."""
    choice = {"index": 0, "delta": {"content": content}, "logprobs": None, "finish_reason": finish_reason}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
