"""One engine per configuration and process, found by value.

LangChain copies, pickles and re-creates model objects freely, so a model holds a configuration and no engine; the
engine that belongs to the configuration is looked up at each call.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .config import EngineConfig
from .errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from .core import StepRecord
    from .local import LocalEngine

__all__ = ["load_engine", "set_max_engines", "shared_engine", "unload"]

logger = logging.getLogger(__name__)

# Whoever was given an engine has used it by then, so that an idle engine is one that nobody is about to use.
_HANDOVER_S = 1.0


@dataclass
class _Slot:
    engine: LocalEngine
    last_used: float  # monotonic time of the last look-up


_slots: dict[EngineConfig, _Slot] = {}
_loading = threading.Lock()
_max_engines = 1


def shared_engine(config: EngineConfig) -> LocalEngine:
    """The engine for a configuration, loaded at first use; blocks while it loads.

    One engine is kept, or as many as ``set_max_engines`` allows: loading a further configuration first closes idle
    engines, the least recently used ones first. An engine that is busy is never closed for another, even if there are
    more than allowed for a while. An engine that died or was closed is replaced.

    Raises:
        MissingDependencyError: The packages of the local engine are not installed.
        PagedLLMError: The engine cannot be loaded.
    """
    engine = _find(config)
    if engine is not None:
        return engine
    with _loading:
        engine = _find(config)
        if engine is None:
            _make_room(num_new=1)
            engine = load_engine(config)
            _slots[config] = _Slot(engine, time.monotonic())
        return engine


def set_max_engines(num_engines: int) -> None:
    """Set how many shared engines this process keeps; 1 unless this is called. Closes idle ones above the limit.

    Raises:
        ConfigError: Not a whole number of at least 1.
    """
    global _max_engines
    if isinstance(num_engines, bool) or not isinstance(num_engines, int) or num_engines < 1:
        raise ConfigError.for_value("num_engines", num_engines, "must be a whole number of at least 1")
    with _loading:
        _max_engines = num_engines
        _make_room(num_new=0)


def unload() -> None:
    """Close all shared engines and free their memory; what is in flight fails with EngineClosedError."""
    with _loading:
        while _slots:
            _slots.popitem()[1].engine.close()


def load_engine(config: EngineConfig, *, on_step: Callable[[StepRecord], None] | None = None) -> LocalEngine:
    """Load an engine of one's own, which nobody shares and the caller closes.

    Args:
        config: What to run and how.
        on_step: Told about every step, from the engine's thread.

    Raises:
        MissingDependencyError: The packages of the local engine are not installed.
        PagedLLMError: The engine cannot be loaded.
    """
    try:
        from .local import LocalEngine  # noqa: PLC0415  torch is heavy, and remote users need not have it
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"the local engine needs the package {error.name!r}: pip install 'langchain-pagedllm[local]'"
        ) from error
    return LocalEngine(config, on_step=on_step)


def _find(config: EngineConfig) -> LocalEngine | None:
    slot = _slots.get(config)
    if slot is None or not slot.engine.health().ok:
        return None
    slot.last_used = time.monotonic()
    return slot.engine


def _make_room(num_new: int) -> None:
    """Give up engines that are dead, and idle ones until ``num_new`` more fit. Under the lock."""
    for config, slot in sorted(_slots.items(), key=lambda item: item[1].last_used):
        is_dead = not slot.engine.health().ok
        if not is_dead and (len(_slots) + num_new <= _max_engines or not slot.engine.is_idle):
            continue
        logger.info("giving up the %s engine for %s", "dead" if is_dead else "idle", config.model)
        del _slots[config]
        # Closing frees the memory even if somebody still refers to the engine, such as the traceback of a notebook's
        # last error. An engine handed out a moment ago is only dropped: it ends with the request that is to come.
        if time.monotonic() - slot.last_used > _HANDOVER_S:
            slot.engine.close()


def _renew_lock() -> None:
    """A child forked while another thread was loading would find the lock taken for ever."""
    global _loading
    _loading = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
