"""One remote engine per configuration and process, found by value, so that connections outlive model objects."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict

from .config import RemoteConfig
from .engine import RemoteEngine

__all__ = ["shared_remote_engine"]

# Enough for a few servers and keys. Whoever still uses an engine that is dropped keeps it until its requests end.
_MAX_ENGINES = 16

_engines: OrderedDict[RemoteConfig, RemoteEngine] = OrderedDict()
_of_parents: list[OrderedDict[RemoteConfig, RemoteEngine]] = []
_lock = threading.Lock()


def shared_remote_engine(config: RemoteConfig) -> RemoteEngine:
    """The engine for a configuration; opens nothing. One that was closed is replaced."""
    with _lock:
        engine = _engines.get(config)
        if engine is None or engine.is_closed:
            engine = _engines[config] = RemoteEngine(config)
        _engines.move_to_end(config)
        dropped = _engines.popitem(last=False)[1] if len(_engines) > _MAX_ENGINES else None
    # Outside the lock: its last reference may go here, and its connections with it.
    del dropped
    return engine


def _start_anew() -> None:
    """A forked child must not write to its parent's connections, nor wait for locks of threads it does not have.

    For the same reason the parent's engines are not closed here, only put away.
    """
    global _engines, _lock
    _lock = threading.Lock()
    _of_parents.append(_engines)
    _engines = OrderedDict()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
