"""Chat and text completions."""

from __future__ import annotations

import functools
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ..wire import Kind, decode_call, parse_json, paths
from .answering import Answer, PreparedCall
from .auth import ApiKey
from .echo import make_echo
from .gate import key_of
from .limits import check_body, check_call
from .reading import read_body
from .schemas import CHAT, COMPLETION, describe
from .service import Service

__all__ = ["answer_call", "generate_routes"]


def generate_routes(service: Service) -> APIRouter:
    """Routes that generate text."""
    router = APIRouter()

    @router.post(paths.GENERATE["chat"], **describe("Continue a chat.", CHAT))
    async def chat_completions(request: Request) -> Response:
        return await answer_call(service, request, "chat")

    @router.post(paths.GENERATE["completion"], **describe("Continue one or more texts.", COMPLETION))
    async def completions(request: Request) -> Response:
        return await answer_call(service, request, "completion")

    return router


async def answer_call(service: Service, request: Request, kind: Kind | None, *, warm: bool = False) -> Answer:
    """Check a request as far as that needs no engine; the answer does the rest.

    Args:
        kind: Of the API; None: whichever the body's fields name.
        warm: Compute prompts and generate nothing.
    """
    body = await read_body(request, service.config)
    prepare = functools.partial(_prepare, service, key_of(request), body, kind, warm)
    return Answer(service, await service.in_thread(prepare))


def _prepare(service: Service, key: ApiKey, text: bytes, kind: Kind | None, warm: bool) -> PreparedCall:
    """Parse and check a body, off the event loop."""
    body: Any = parse_json(text)
    check_body(body, service.config)
    call = decode_call(_warming(body) if warm else body, kind)
    check_call(call, service.config)
    service.check_model(call.model)
    engine = service.engine
    ticket = service.tenants.enter(key, call.request_id)
    try:
        requests = service.tenants.scope(key, call, engine.count_tokens)
        echoes = [make_echo(engine, item) for item in call.requests] if call.echo else []
        counts = [engine.count_tokens(item) for item in call.requests] if call.continuous_usage else []
    except BaseException:
        ticket.close()
        raise
    return PreparedCall(call=call, key=key, requests=requests, echoes=echoes, prompt_tokens=counts, ticket=ticket)


def _warming(body: Any) -> Any:
    """The body with the hint ``warm``; what is no body is refused by who reads it."""
    if not isinstance(body, dict):
        return body
    hints = body.get("cache_hints") or {}
    return body | {"cache_hints": hints | {"warm": True}} if isinstance(hints, dict) else body
