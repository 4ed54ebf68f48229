"""The prefix cache: warm it, ask it, reset it."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ..api import GenerateRequest
from ..errors import InvalidRequestError
from ..wire import decode_call, encode_match, encode_stats, parse_json, paths
from .auth import ApiKey
from .gate import key_of
from .json_response import json_response
from .limits import check_body
from .reading import read_body
from .refusals import NOT_ADMIN, Refusal
from .routes_generate import answer_call
from .schemas import EITHER, NOTHING, describe
from .service import Service

__all__ = ["cache_routes"]


def cache_routes(service: Service) -> APIRouter:
    """Routes under ``/v1/cache``."""
    router = APIRouter()

    @router.post(paths.CACHE_WARM, **describe("Compute and cache a prompt, generate nothing.", EITHER))
    async def warm(request: Request) -> Response:
        return await answer_call(service, request, None, warm=True)

    @router.post(paths.CACHE_MATCH, **describe("How many tokens of a prompt are cached now.", EITHER))
    async def match(request: Request) -> Response:
        body, key = await read_body(request, service.config), key_of(request)
        # In a thread of its own, where it may block: it encodes the prompt, then waits for the engine.
        count = await service.in_thread(lambda: service.engine.match_prefix(_one_request(service, key, body)))
        return json_response(encode_match(count))

    @router.post(paths.CACHE_RESET, **describe("Forget all cached prefixes.", NOTHING))
    async def reset(request: Request) -> Response:
        if not key_of(request).is_admin:
            raise Refusal(NOT_ADMIN)
        await service.engine.areset_prefix_cache()
        return json_response({"reset": True})

    @router.get(paths.CACHE_STATS, **describe("Figures: an admin's of all, else the key's own."))
    async def stats(request: Request) -> Response:
        key, tenants = key_of(request), service.tenants
        if not key.is_admin:
            return json_response({"tenant": tenants.figures(key)})
        figures = [tenants.figures(item) for item in service.ring.keys or (key,)]
        return json_response(encode_stats(await service.engine.astats()) | {"tenants": figures})

    return router


def _one_request(service: Service, key: ApiKey, text: bytes) -> GenerateRequest:
    body: Any = parse_json(text)
    check_body(body, service.config)
    call = decode_call(body)
    service.check_model(call.model)
    if len(call.requests) != 1:
        raise InvalidRequestError("prompt must be one prompt here", param="prompt")
    (request,) = call.requests
    return dataclasses.replace(request, hints=service.tenants.scope_hints(key, request.hints))
