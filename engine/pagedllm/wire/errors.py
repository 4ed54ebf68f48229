"""PagedLLMError <-> HTTP status and OpenAI's error body."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import (
    ContextLengthError,
    EngineClosedError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    PagedLLMError,
    QueueFullError,
    QueueTimeoutError,
)

__all__ = ["HttpError", "decode_error", "encode_error", "retry_after_s"]

_RETRY_AFTER_S = 1

# Code in the body -> class. Only these texts are shown to clients besides an invalid request's own.
_ENGINE_ERRORS: dict[str, type[EngineError]] = {
    "queue_full": QueueFullError,
    "queue_timeout": QueueTimeoutError,
    "overloaded": OverloadedError,
    "engine_closed": EngineClosedError,
    "engine_dead": EngineDeadError,
    "internal_error": EngineError,
}
_TEXTS = {
    "queue_full": "too many requests are waiting: try again later",
    "queue_timeout": "the request waited too long without being computed: try again later",
    "overloaded": "the server is too busy: try again later",
    "engine_closed": "the server is shutting down",
    "engine_dead": "the engine has stopped and serves no more requests",
    "internal_error": "internal error",
}


@dataclass(frozen=True, kw_only=True)
class HttpError:
    """An error as HTTP carries it.

    Args:
        message: For people.
        kind: OpenAI's ``type``.
        param: The field that is wrong, if one is.
        code: For programs.
        retry_after_s: When to try again, if that may help.
    """

    status: int
    message: str
    kind: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def all_headers(self) -> dict[str, str]:
        retry = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return {**self.headers, **retry}


def encode_error(error: BaseException) -> HttpError:
    """What a client is told. Of what is not its own request's fault, it gets a fixed text."""
    if isinstance(error, InvalidRequestError):
        return HttpError(
            status=400, message=str(error), kind="invalid_request_error", param=error.param, code=error.code
        )
    code = "internal_error"
    if isinstance(error, EngineError):
        code = next(code for code, kind in _ENGINE_ERRORS.items() if isinstance(error, kind))
    if code == "internal_error":
        return HttpError(status=500, message=_TEXTS[code], kind="internal_error", code=code)
    retry_after_s = _RETRY_AFTER_S if isinstance(error, OverloadedError) else None
    return HttpError(status=503, message=_TEXTS[code], kind="unavailable", code=code, retry_after_s=retry_after_s)


def decode_error(status: int, body: Any) -> PagedLLMError:
    """The error that an HTTP status, or an event in a stream, stands for.

    Args:
        status: Of the answer; 500 for an event.
        body: Its JSON, if it is JSON: ours, or that of another server of OpenAI's API.
    """
    error = body.get("error") if isinstance(body, Mapping) else None
    error = error if isinstance(error, Mapping) else {}
    code, param = error.get("code"), error.get("param")
    message = error.get("message") or f"the server answered with status {status}"
    if code in _ENGINE_ERRORS:
        return _ENGINE_ERRORS[code](message)
    if code == ContextLengthError.code or (status == 400 and "context length" in str(message)):
        return ContextLengthError(message, param=param)
    if status in (429, 503):
        return OverloadedError(message)
    if 400 <= status < 500 and status not in (401, 403, 408):
        return InvalidRequestError(message, param=param if isinstance(param, str) else None)
    return EngineError(message)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a ``Retry-After`` header asks for, if it names a number of them."""
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
