"""What went wrong over HTTP, as errors of ours."""

from __future__ import annotations

from typing import Any

import httpx
import httpx_sse

from ..errors import (
    AuthenticationError,
    ConnectionFailedError,
    EngineError,
    ModelNotFoundError,
    PagedLLMError,
    PermissionDeniedError,
    RateLimitError,
    ResponseTimeoutError,
)
from ..wire import decode_error, paths

__all__ = ["answer_error", "decode_json", "event_error", "transport_error"]

# Statuses that mean the same with every server, whatever else the body says.
_CLASSES: dict[int, type[PagedLLMError]] = {
    401: AuthenticationError,
    403: PermissionDeniedError,
    408: ResponseTimeoutError,
    429: RateLimitError,
    504: ResponseTimeoutError,
}
_MAX_MESSAGE_CHARS = 2000


def answer_error(response: httpx.Response) -> PagedLLMError:
    """The error that an answer stands for, with the answer as its ``response``.

    Args:
        response: Read, and no success.
    """
    status, body = response.status_code, _json_or_none(response)
    error = decode_error(status, body)
    message = str(error)[:_MAX_MESSAGE_CHARS]
    # Without a body of OpenAI's form it is not the endpoint that answers, but something before or instead of it.
    is_endpoint = isinstance(body, dict) and isinstance(body.get("error"), dict)
    if status in _CLASSES:
        error = _CLASSES[status](message)
    elif status in (404, 405):
        path = response.request.url.path
        if is_endpoint and path.endswith(tuple(paths.GENERATE.values())):
            error = ModelNotFoundError(message)
        else:
            error = EngineError(f"the server does not offer {path}: {message}")
    elif response.is_redirect:
        location = response.headers.get("location", "")[:200]
        error = EngineError(f"the server answered with a redirection to {location!r}: correct base_url")
    return _attach(error, response)


def _attach(error: PagedLLMError, response: httpx.Response) -> PagedLLMError:
    """LangChain's tracing reads these two. The key goes: errors are logged, pickled and sent to trackers."""
    response.request.headers.pop("authorization", None)
    error.__dict__["response"] = response
    error.__dict__["request_id"] = response.headers.get("x-request-id")
    return error


def event_error(event: dict[str, Any], response: httpx.Response) -> PagedLLMError:
    """The error that an event in a stream stands for. The status was sent before it was known: it says success."""
    error = event.get("error")
    status = error.get("status") or error.get("code") if isinstance(error, dict) else None
    # vLLM puts the status where OpenAI has a word.
    if not isinstance(status, int) or not 400 <= status < 600:
        status = 500
    return _attach(decode_error(status, event), response)


def decode_json(response: httpx.Response) -> Any:
    """The JSON of an answer that has been read.

    Raises:
        EngineError: It is none.
    """
    body = _json_or_none(response)
    if not isinstance(body, dict):
        raise _attach(EngineError(f"the answer of {response.request.url.path} is no JSON object"), response)
    return body


def transport_error(error: httpx.HTTPError, url: str) -> PagedLLMError:
    """An error of ours for one of the connection's; the request, if it was sent, may have run on the server."""
    reason = str(error) or type(error).__name__
    if isinstance(error, httpx_sse.SSEError):
        return EngineError(f"{url} did not answer with a stream: {reason}")
    if isinstance(error, httpx.ConnectTimeout):
        return ConnectionFailedError(f"cannot connect to {url}: timed out")
    if isinstance(error, httpx.ConnectError):
        return ConnectionFailedError(f"cannot connect to {url}: {reason}")
    if isinstance(error, httpx.TimeoutException):
        return ResponseTimeoutError(f"{url} was silent for too long ({reason}); the request was given up")
    return ConnectionFailedError(f"the connection to {url} was lost before the answer was complete: {reason}")


def _json_or_none(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None
