"""What operators and clients ask about the server itself."""

from __future__ import annotations

import dataclasses
import importlib.metadata

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ..api import Health
from ..wire import encode_health, encode_models, paths
from .gate import key_of
from .json_response import json_response
from .metrics import CONTENT_TYPE
from .refusals import NOT_ADMIN, Refusal
from .schemas import describe
from .service import Service

__all__ = ["operation_routes"]


def operation_routes(service: Service) -> APIRouter:
    """Models, health, metrics, version."""
    router = APIRouter()

    @router.get(paths.MODELS, **describe("The model that is served."))
    async def models() -> Response:
        info = dataclasses.replace(service.model_info, model=service.model_name)
        return json_response(encode_models(info, name=service.model_name, created=service.started))

    @router.get(paths.HEALTH, **describe("200 while the engine lives and moves, else 503. Needs no key."))
    async def health() -> Response:
        return _health_response(service.monitor.health())

    @router.get(paths.READY, **describe("200 while new requests are taken, else 503."))
    async def ready() -> Response:
        if service.is_draining:
            return _health_response(Health(ok=False, reason="the server is shutting down"))
        return _health_response(service.monitor.health())

    @router.get(paths.METRICS, **describe("Figures of all keys for Prometheus; needs an admin's key."))
    async def metrics(request: Request) -> Response:
        if not key_of(request).is_admin:
            raise Refusal(NOT_ADMIN)
        return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})

    @router.get(paths.VERSION, **describe("The version of this software."))
    async def version() -> Response:
        return json_response({"version": importlib.metadata.version("langchain-pagedllm")})

    return router


def _health_response(health: Health) -> Response:
    return json_response(encode_health(health), status=200 if health.ok else 503)
