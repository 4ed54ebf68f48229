"""What the KV cache reports of itself."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KVCounters", "KVUsage"]


@dataclass(frozen=True, kw_only=True)
class KVUsage:
    """How the pools are used now; ``num_free + num_cached + num_referenced == num_blocks``.

    Args:
        num_pinned: Device blocks that pins hold, referenced or cached.
        num_host_cached: Host blocks with prefixes that left the device; the rest of those that are not free belongs
            to preempted sequences.
    """

    num_blocks: int
    num_free: int
    num_cached: int
    num_referenced: int
    num_pinned: int = 0
    num_host_blocks: int = 0
    num_host_free: int = 0
    num_host_cached: int = 0


@dataclass
class KVCounters:
    """Sums since the engine's start; tokens, events and seconds."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_hits_on_host: int = 0
    num_evictions: int = 0
    lifetime_s: float = 0.0
    idle_before_evict_s: float = 0.0
    num_reuses: int = 0
    reuse_gap_s: float = 0.0

    def count_evictions(self, number: int, age_s: float, idle_s: float) -> None:
        """Count blocks, with the sums of their ages and of the times for which they had been idle."""
        self.num_evictions += number
        self.lifetime_s += age_s
        self.idle_before_evict_s += idle_s

    def count_reuse(self, gap_s: float) -> None:
        self.num_reuses += 1
        self.reuse_gap_s += gap_s
