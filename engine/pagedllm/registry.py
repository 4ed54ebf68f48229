"""One engine per configuration and process, found by value.

LangChain copies, pickles and re-creates model objects freely, so a model holds a configuration and no engine; the
engine that belongs to the configuration is looked up at each call.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

from .config import EngineConfig
from .errors import MissingDependencyError

if TYPE_CHECKING:
    from .local import LocalEngine

__all__ = ["shared_engine", "unload"]

logger = logging.getLogger(__name__)

_engines: dict[EngineConfig, LocalEngine] = {}
_loading = threading.Lock()


def shared_engine(config: EngineConfig) -> LocalEngine:
    """The engine for a configuration, loaded at first use; blocks while it loads.

    At most one engine is kept besides busy ones: loading another configuration lets go of idle engines. An engine
    that was let go still serves whoever holds it, and frees its memory when the last of them drops it. An engine
    that died or was closed is replaced.

    Raises:
        MissingDependencyError: The packages of the local engine are not installed.
        PagedLLMError: The engine cannot be loaded.
    """
    engine = _engines.get(config)
    if engine is not None and engine.health().ok:
        return engine
    with _loading:
        engine = _engines.get(config)
        if engine is not None and engine.health().ok:
            return engine
        for other in [key for key, value in _engines.items() if value.is_idle or not value.health().ok]:
            logger.info("letting go of the idle engine for %s", other.model)
            del _engines[other]
        engine = _engines[config] = _load(config)
        return engine


def unload() -> None:
    """Close all shared engines and free their memory; what is in flight fails with EngineClosedError."""
    with _loading:
        while _engines:
            _engines.popitem()[1].close()


def _load(config: EngineConfig) -> LocalEngine:
    try:
        from .local import LocalEngine  # noqa: PLC0415  torch is heavy, and remote users need not have it
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"the local engine needs the package {error.name!r}: pip install 'langchain-pagedllm[local]'"
        ) from error
    return LocalEngine(config)


def _renew_lock() -> None:
    """A child forked while another thread was loading would find the lock taken for ever."""
    global _loading
    _loading = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
