"""What all routes share: the engine and those who watch over it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ..api import Engine
from ..wire import HttpError
from .auth import KeyRing
from .config import ServerConfig
from .metrics import Metrics
from .monitor import Monitor
from .refusals import not_found
from .tenants import Tenants

__all__ = ["Service"]

_Value = TypeVar("_Value")

# Parsing, templates and tokenising of prompts: enough that a large one does not hold up small ones.
_NUM_THREADS = 4


class Service:
    """One engine being served; lives as long as the application.

    Args:
        engine: Not closed here.
        config: How to serve it.
        metrics: To use instead of new ones.
    """

    def __init__(self, engine: Engine, config: ServerConfig, metrics: Metrics | None = None) -> None:
        info = engine.model_info()
        self.engine = engine
        self.config = config
        self.model_info = info
        # A path is nobody's business but the operator's.
        self.model_name = config.served_model_name or (Path(info.model).name if _is_path(info.model) else info.model)
        self.started = int(time.time())
        self.ring = KeyRing(config.api_keys, share_cache=config.share_cache)
        self.tenants = Tenants(self.ring, config, pool_tokens=info.num_blocks * info.block_size)
        self.monitor = Monitor(engine, stuck_after_s=config.stuck_after_s)
        self.metrics = metrics or Metrics()
        self.metrics.watch(lambda: self.monitor.stats)
        self.is_draining = False
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="pagedllm-prompts")
        self._enders: set[Callable[[HttpError], None]] = set()

    async def in_thread(self, function: Callable[[], _Value]) -> _Value:
        """Run what may take long without holding up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model; without a name it is this one."""
        if name is not None and name != self.model_name:
            message = f"model {name[:80]!r} is not served here; {self.model_name!r} is"
            raise not_found(message, code="model_not_found", param="model")

    def register(self, ender: Callable[[HttpError], None]) -> None:
        """Remember how to end a call that is open."""
        self._enders.add(ender)

    def unregister(self, ender: Callable[[HttpError], None]) -> None:
        self._enders.discard(ender)

    def drain(self) -> None:
        """Take no more requests; those that run go on."""
        self.is_draining = True

    def end_all(self, error: HttpError) -> None:
        """End every open call with an error."""
        for ender in list(self._enders):
            ender(error)

    async def close(self) -> None:
        await self.monitor.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _is_path(model: str) -> bool:
    return Path(model).is_absolute() or Path(model).exists()
