"""The last net: a fault of ours becomes an error with a fixed text."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .answering import error_of
from .json_response import error_response
from .service import Service

__all__ = ["Guard"]


class Guard:
    """ASGI middleware around all routes.

    Starlette's own would log the fault with its message, which may quote a prompt.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            has_started = has_started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            if scope["type"] != "http":
                raise
            shown = error_of(error)
            self._service.metrics.count_rejection(shown.code or "error")
            if not has_started:
                await error_response(shown)(scope, receive, send)
