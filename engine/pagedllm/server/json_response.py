"""Small answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from ..wire import HttpError, dump_json

__all__ = ["error_response", "json_response"]


def json_response(value: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dump_json(value), status_code=status, media_type="application/json", headers=dict(headers or {}))


def error_response(error: HttpError) -> Response:
    return json_response(error.body(), status=error.status, headers=error.all_headers())
