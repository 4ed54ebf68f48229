"""The application from the arguments of ``serve run``, which are text, or of a Serve configuration file."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from typing import Any

from ray import serve

from ..config import EngineConfig
from ..errors import ConfigError
from ..server.auth import find_keys
from ..server.config import ServerConfig
from .application import build_application
from .config import ClusterConfig

__all__ = ["build_from_arguments"]

# Whose values come from elsewhere: Serve listens, and secrets are not for command lines.
_NOT_HERE = ("host", "port", "api_keys")


def build_from_arguments(args: Mapping[str, Any]) -> serve.Application:
    """See ``pagedllm.cluster.app``."""
    left = dict(args)
    values = {kind: _take(kind, left) for kind in (EngineConfig, ServerConfig, ClusterConfig)}
    if left:
        known = sorted(name for kind in values for name in _fields(kind))
        raise ConfigError(f"unknown option {min(left)!r}; known: {', '.join(known)}")
    keys = tuple(find_keys())
    # Serve listens, so that the address is not known here. Without keys, only names of this machine are let in.
    is_open = bool(keys) or values[ServerConfig].get("allow_unauthenticated") is True
    host = "0.0.0.0" if is_open else "127.0.0.1"
    server_config = ServerConfig(**values[ServerConfig], host=host, api_keys=keys)
    return build_application(
        EngineConfig(**values[EngineConfig]), server_config, ClusterConfig(**values[ClusterConfig])
    )


def _take(kind: type, left: dict[str, Any]) -> dict[str, Any]:
    """The values for a class's fields, out of those that are left."""
    types = typing.get_type_hints(kind)
    return {name: _read(name, types[name], left.pop(name)) for name in _fields(kind) if name in left}


def _fields(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.name not in _NOT_HERE]


def _read(name: str, kind: Any, value: Any) -> Any:
    """A value of an option: text stands for itself where the option may be text, else for JSON."""
    if not isinstance(value, str) or str in (typing.get_args(kind) or (kind,)):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ConfigError.for_value(name, value, f"must be JSON ({error})") from error
