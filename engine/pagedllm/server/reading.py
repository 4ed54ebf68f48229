"""A request's body, within bounds of size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from .config import ServerConfig
from .refusals import TIMED_OUT, Refusal, bad_media_type, too_large

__all__ = ["read_body"]


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """The whole body.

    Raises:
        Refusal: It is no JSON by its header, is too long, or comes too slowly.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise bad_media_type()
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > config.max_body_bytes:
        raise too_large(config.max_body_bytes)
    try:
        return await asyncio.wait_for(_read(request, config.max_body_bytes), config.idle_timeout_s)
    except asyncio.TimeoutError as error:
        raise Refusal(TIMED_OUT) from error


async def _read(request: Request, limit: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise too_large(limit)
        pieces.append(piece)
    return b"".join(pieces)
