"""The application: routes over any engine."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ..errors import PagedLLMError
from ..wire import HttpError
from .answering import error_of
from .gate import Gate
from .guard import Guard
from .json_response import error_response
from .refusals import Refusal
from .routes_cache import cache_routes
from .routes_generate import generate_routes
from .routes_operations import operation_routes
from .routes_tokens import token_routes
from .service import Service

__all__ = ["create_app"]


def create_app(service: Service) -> FastAPI:
    """The ASGI application that serves one engine.

    There are no pages of documentation: they would fetch scripts from elsewhere. ``/openapi.json`` is there.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.monitor.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="pagedllm",
        version=importlib.metadata.version("langchain-pagedllm"),
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    for router in (generate_routes(service), operation_routes(service), token_routes(service), cache_routes(service)):
        app.include_router(router)

    async def show_error(_: Request, error: Exception) -> Response:
        shown = _of_http(error) if isinstance(error, HTTPException) else error_of(error)
        service.metrics.count_rejection(shown.code or "error")
        return error_response(shown)

    async def leave(_: Request, __: Exception) -> Response:
        return Response(status_code=400)  # nobody reads it

    for kind in (HTTPException, PagedLLMError, Refusal):
        app.add_exception_handler(kind, show_error)
    app.add_exception_handler(ClientDisconnect, leave)
    app.add_middleware(Guard, service=service)
    app.add_middleware(Gate, service=service)
    return app


def _of_http(error: HTTPException) -> HttpError:
    """A path or method that is not there."""
    message = {404: "there is no such path", 405: "this path does not know that method"}.get(error.status_code)
    return HttpError(
        status=error.status_code,
        message=message or "the request is wrong",
        kind="invalid_request_error",
        code="not_found" if error.status_code == 404 else None,
        headers=dict(error.headers or {}),
    )
