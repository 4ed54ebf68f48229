"""What the server itself refuses, before an engine sees it."""

from __future__ import annotations

from ..wire import HttpError

__all__ = [
    "BAD_KEY",
    "BUSY_KEY",
    "FULL",
    "NOT_ADMIN",
    "SHUTTING_DOWN",
    "TIMED_OUT",
    "Refusal",
    "bad_host",
    "bad_media_type",
    "not_found",
    "too_large",
]

_RETRY_AFTER_S = 1
_REQUEST = "invalid_request_error"

BAD_KEY = HttpError(
    status=401,
    message="an API key is needed: Authorization: Bearer KEY",
    kind="authentication_error",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)
NOT_ADMIN = HttpError(
    status=403, message="this needs an API key that is marked admin", kind="permission_error", code="not_admin"
)
FULL = HttpError(
    status=503,
    message="too many requests are open: try again later",
    kind="unavailable",
    code="queue_full",
    retry_after_s=_RETRY_AFTER_S,
)
BUSY_KEY = HttpError(
    status=429,
    message="too many requests of this API key are open: try again later",
    kind="rate_limit_error",
    code="rate_limit_exceeded",
    retry_after_s=_RETRY_AFTER_S,
)
# Without Retry-After: the same request would take as long again.
TIMED_OUT = HttpError(
    status=503, message="the request took longer than this server allows", kind="unavailable", code="request_timeout"
)
SHUTTING_DOWN = HttpError(status=503, message="the server is shutting down", kind="unavailable", code="engine_closed")


class Refusal(Exception):
    """Ends a request with an error of HTTP."""

    def __init__(self, error: HttpError) -> None:
        super().__init__(error.message)
        self.error = error


def too_large(limit: int) -> Refusal:
    message = f"the body is longer than the {limit} bytes that this server takes"
    return Refusal(HttpError(status=413, message=message, kind=_REQUEST, code="body_too_large"))


def bad_media_type() -> Refusal:
    # A page in a browser may send other types to this machine without asking.
    message = "Content-Type must be application/json"
    return Refusal(HttpError(status=415, message=message, kind=_REQUEST, code="unsupported_media_type"))


def not_found(message: str, *, code: str, param: str | None = None) -> Refusal:
    return Refusal(HttpError(status=404, message=message, kind=_REQUEST, code=code, param=param))


def bad_host() -> Refusal:
    message = "this server is known under names of this machine only"
    return Refusal(HttpError(status=400, message=message, kind=_REQUEST, code="unknown_host"))
