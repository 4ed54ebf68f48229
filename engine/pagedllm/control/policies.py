"""In which order requests run, and which gives way: one rank per sequence, lower is better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .sequence import Sequence

__all__ = ["POLICIES", "Policy", "Rank"]

Rank = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How to rank.

    Args:
        name: What users call it.
        rank: The rank of a sequence, given how many of its prompt tokens are cached. It ends in the arrival number,
            so no two are equal, and it stays the same while the sequence runs, so that the best of those that run is
            never preempted and always finishes.
        looks_at_cache: Whether the rank depends on what is cached, so that the queue has to look.
        uses_priority: Whether the request's own priority counts.
    """

    name: str
    rank: Callable[[Sequence, int], Rank]
    looks_at_cache: bool = False
    uses_priority: bool = False

    def rank_of_running(self, sequence: Sequence) -> Rank:
        """Of a sequence that runs or ran, or of a better one that waits for what it computes."""
        rank = self.rank(sequence, sequence.num_cached_tokens or 0)
        return rank if sequence.lent_rank is None else min(rank, sequence.lent_rank)


def _arrival(sequence: Sequence, num_cached: int) -> Rank:
    del num_cached
    return (sequence.arrival_number,)


def _priority(sequence: Sequence, num_cached: int) -> Rank:
    del num_cached
    return (sequence.hints.priority, sequence.arrival_number)


def _num_uncached(sequence: Sequence, num_cached: int) -> Rank:
    """Least to compute first: the mean wait is shortest that way, as with shortest-job-first in queueing theory."""
    return (sequence.num_prompt_tokens - num_cached, sequence.arrival_number)


def _longest_prefix(sequence: Sequence, num_cached: int) -> Rank:
    """Longest cached prefix first, so that a prefix is used while it is there (SGLang, arXiv 2312.07104)."""
    return (-num_cached, sequence.arrival_number)


POLICIES = {
    policy.name: policy
    for policy in (
        Policy(name="fcfs", rank=_arrival),
        Policy(name="priority", rank=_priority, uses_priority=True),
        Policy(name="shortest", rank=_num_uncached, looks_at_cache=True),
        Policy(name="cache_aware", rank=_longest_prefix, looks_at_cache=True),
    )
}
