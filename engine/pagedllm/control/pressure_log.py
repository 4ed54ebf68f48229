"""Says, now and then, that the KV pool is nearly full or too small, and which option to change."""

from __future__ import annotations

import logging
import time

from .kv_counters import KVUsage

__all__ = ["PressureLog"]

logger = logging.getLogger(__name__)

_HIGH_USAGE = 0.9
_INTERVAL_S = 60.0


class PressureLog:
    """At most one line a minute."""

    def __init__(self) -> None:
        self._silent_until = 0.0

    def observe(self, usage: KVUsage, num_preempted: int) -> None:
        """Look at the cache after a step, in which so many sequences were preempted."""
        share = usage.num_referenced / usage.num_blocks
        if (share < _HIGH_USAGE and not num_preempted) or time.monotonic() < self._silent_until:
            return
        self._silent_until = time.monotonic() + _INTERVAL_S
        happening = "sequences are being preempted" if num_preempted else "sequences may soon be preempted"
        logger.warning(
            "the KV pool of %d blocks is %d %% in use and %s: raise kv_cache_memory_bytes, or lower max_num_seqs",
            usage.num_blocks, round(100 * share), happening,
        )  # fmt: skip
