"""Texts <-> token ids."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ..errors import InvalidRequestError
from ..wire import (
    decode_detokenize_call,
    decode_tokenize_call,
    encode_text,
    encode_tokens,
    parse_json,
    paths,
)
from .json_response import json_response
from .reading import read_body
from .schemas import DETOKENIZE, TOKENIZE, describe
from .service import Service

__all__ = ["token_routes"]


def token_routes(service: Service) -> APIRouter:
    """Routes for tokens; they have vLLM's paths and forms."""
    router = APIRouter()

    @router.post(paths.TOKENIZE, **describe("Token ids of a text, or the number of tokens of a chat.", TOKENIZE))
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, service.config)
        return json_response(await service.in_thread(lambda: _tokenize(service, body)))

    @router.post(paths.DETOKENIZE, **describe("The text of token ids.", DETOKENIZE))
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, service.config)
        return json_response(await service.in_thread(lambda: _detokenize(service, body)))

    return router


def _tokenize(service: Service, text: bytes) -> dict[str, Any]:
    call = decode_tokenize_call(parse_json(text))
    service.check_model(call.model)
    limit = service.model_info.max_model_len
    if call.request is not None:
        return encode_tokens(count=service.engine.count_tokens(call.request), max_model_len=limit)
    assert call.text is not None
    token_ids = service.engine.tokenize(call.text, add_special_tokens=call.add_special_tokens)
    return encode_tokens(count=len(token_ids), max_model_len=limit, token_ids=token_ids)


def _detokenize(service: Service, text: bytes) -> dict[str, Any]:
    token_ids = decode_detokenize_call(parse_json(text))
    size = service.model_info.vocab_size
    for token_id in token_ids:
        if not 0 <= token_id < size:
            raise InvalidRequestError.for_value("tokens", token_id, f"a token id must be in 0..{size - 1}")
    return encode_text(service.engine.detokenize(token_ids))
