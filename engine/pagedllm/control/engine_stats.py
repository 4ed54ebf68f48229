"""A snapshot of scheduler and cache, as users see it."""

from __future__ import annotations

from ..api import EngineStats
from .scheduler import Scheduler

__all__ = ["collect_stats"]


def collect_stats(
    scheduler: Scheduler, *, num_steps: int, num_generated_tokens: int, num_timed_out: int
) -> EngineStats:
    """Read everything between two steps."""
    manager = scheduler.kv_cache_manager
    usage, counters, preemptions = manager.usage, manager.counters, scheduler.preemptions
    num_slots = sum(len(sequence.block_table) for sequence in scheduler.running) * manager.block_size
    num_used = sum(sequence.num_computed_tokens for sequence in scheduler.running)
    return EngineStats(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_swapped=sum(sequence.swapped is not None for sequence in scheduler.waiting),
        num_running_peak=scheduler.num_running_peak,
        num_blocks=usage.num_blocks,
        num_free_blocks=usage.num_free,
        num_cached_blocks=usage.num_cached,
        num_referenced_blocks=usage.num_referenced,
        num_pinned_blocks=usage.num_pinned,
        num_unused_slots=num_slots - num_used,
        num_host_blocks=usage.num_host_blocks,
        num_free_host_blocks=usage.num_host_free,
        num_cached_host_blocks=usage.num_host_cached,
        prefix_queries=counters.prefix_queries,
        prefix_hits=counters.prefix_hits,
        prefix_hits_on_host=counters.prefix_hits_on_host,
        num_waits_for_prefix=scheduler.num_waits_for_prefix,
        num_preemptions=scheduler.num_preemptions,
        num_preemptions_by_swap=preemptions["swap"],
        num_preemptions_for_prefill=preemptions["prefill"],
        num_swapped_out_blocks=manager.host.num_copied_out,
        num_swapped_in_blocks=manager.host.num_copied_in,
        num_pins=len(manager.pins),
        hint_outcomes=tuple(sorted((*key, count) for key, count in scheduler.hint_keeper.counts.items())),
        num_evictions=counters.num_evictions,
        block_lifetime_s=_mean(counters.lifetime_s, counters.num_evictions),
        block_idle_before_evict_s=_mean(counters.idle_before_evict_s, counters.num_evictions),
        block_reuse_gap_s=_mean(counters.reuse_gap_s, counters.num_reuses),
        num_refused=scheduler.num_refused,
        num_timed_out=num_timed_out,
        num_steps=num_steps,
        num_generated_tokens=num_generated_tokens,
    )


def _mean(total: float, count: int) -> float:
    return total / count if count else 0.0
