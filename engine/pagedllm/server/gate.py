"""The way in: no request reaches a route without passing here."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..wire import HttpError, dump_json, paths
from .auth import ApiKey
from .config import is_loopback
from .refusals import BAD_KEY, SHUTTING_DOWN, Refusal, bad_host
from .service import Service

__all__ = ["Gate", "key_of"]

_OPEN_PATHS = (paths.HEALTH,)
_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"server", b"pagedllm")]


class Gate:
    """ASGI middleware: the API key on every path but ``/health``, a known host name, and nothing new while draining."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        try:
            scope.setdefault("state", {})["key"] = self._admit(Request(scope))
        except Refusal as refusal:
            await _send_error(send_with_headers, refusal.error)
            return
        await self._app(scope, receive, send_with_headers)

    def _admit(self, request: Request) -> ApiKey | None:
        service = self._service
        if not service.config.api_keys and is_loopback(service.config.host):
            self._check_host(request)
        if request.url.path in _OPEN_PATHS:
            return None
        key = service.ring.find(request.headers.get("authorization"))
        if key is None:
            raise Refusal(BAD_KEY)
        if service.is_draining and request.method == "POST":
            raise Refusal(SHUTTING_DOWN)
        return key

    def _check_host(self, request: Request) -> None:
        """A web page whose name was made to point here asks under that name; only this machine's are ours."""
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        if name and not is_loopback(name) and name != self._service.config.host:
            raise bad_host()


def key_of(request: Request) -> ApiKey:
    """The key that the gate let in."""
    key: ApiKey = request.scope["state"]["key"]
    return key


async def _send_error(send: Send, error: HttpError) -> None:
    body = dump_json(error.body())
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.all_headers().items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
