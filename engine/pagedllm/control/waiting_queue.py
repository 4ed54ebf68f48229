"""Who waits, and who is next."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from .policies import Policy, Rank
from .sequence import Sequence

__all__ = ["MAX_OVERTAKING", "WaitingQueue"]

MAX_OVERTAKING = 128
_WINDOW = 128


class WaitingQueue:
    """Sequences that have not begun, and those that were preempted.

    Preempted ones go first, except under a policy of priorities. Then the policy decides; one that looks at the cache
    looks only at the 128 that arrived first. So that nothing starves, whoever arrived first goes before all others
    once ``MAX_OVERTAKING`` later ones have gone before it. As the first of all has been overtaken at least as often as
    any other, nobody is overtaken by more than that and the few that one step admits together.

    Args:
        policy: How to rank.
        num_cached_tokens: Tells how much of a sequence's prompt is cached now.
    """

    def __init__(self, policy: Policy, num_cached_tokens: Callable[[Sequence], int]) -> None:
        self._policy = policy
        self._num_cached_tokens = num_cached_tokens
        self._arrived: OrderedDict[Sequence, None] = OrderedDict()
        self._preempted: dict[Sequence, None] = {}
        # The same as _arrived, in order of rank, where ranks do not change.
        self._ranked: list[tuple[Rank, Sequence]] = []
        self._num_arrived = 0
        self._num_left = 0
        self.num_requests = 0

    def __len__(self) -> int:
        return len(self._arrived) + len(self._preempted)

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, in no particular order."""
        return itertools.chain(self._preempted, self._arrived)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence, and give it its number."""
        sequence.arrival_number = self._num_arrived
        self._num_arrived += 1
        self._arrived[sequence] = None
        self.num_requests += sequence.leader is None
        if self._policy.uses_priority:
            bisect.insort(self._ranked, (self._policy.rank(sequence, 0), sequence), key=lambda entry: entry[0])

    def add_preempted(self, sequence: Sequence) -> None:
        self._preempted[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Take one out, because it begins, resumes or was aborted."""
        if sequence in self._preempted:
            del self._preempted[sequence]
            return
        del self._arrived[sequence]
        self._num_left += 1
        self.num_requests -= sequence.leader is None
        if self._policy.uses_priority:
            rank = self._policy.rank(sequence, 0)
            del self._ranked[bisect.bisect_left(self._ranked, rank, key=lambda entry: entry[0])]

    def rank_of(self, sequence: Sequence) -> Rank:
        if sequence in self._preempted:
            return self._policy.rank_of_running(sequence)
        num_cached = self._num_cached_tokens(sequence) if self._policy.looks_at_cache else 0
        return self._policy.rank(sequence, num_cached)

    def in_order(self) -> Iterator[Sequence]:
        """Who to admit first, second and so on. Removing those that were yielded does not disturb it."""
        aged = self._aged()
        preempted = sorted(self._preempted, key=self._policy.rank_of_running)
        if not self._policy.uses_priority:
            yield from preempted
        if aged is not None:
            yield aged
        for sequence in self._by_policy(preempted):
            if sequence is not aged:
                yield sequence

    def timed_out(self, before: float) -> list[Sequence]:
        """Those that arrived before a time, and none of whose request's choices has begun."""
        late = itertools.takewhile(lambda sequence: sequence.arrival_time < before, self._arrived)
        return [sequence for sequence in late if (sequence.leader or sequence).first_scheduled_time is None]

    def _aged(self) -> Sequence | None:
        """The first to have arrived, if it has been overtaken often enough."""
        oldest = next(iter(self._arrived), None)
        if oldest is None or self._num_left < oldest.arrival_number + MAX_OVERTAKING:
            return None
        return oldest

    def _by_policy(self, preempted: list[Sequence]) -> Iterator[Sequence]:
        if self._policy.uses_priority:
            resuming = [(self._policy.rank_of_running(sequence), sequence) for sequence in preempted]
            ranked: Iterable[tuple[Rank, Sequence]] = self._ranked[:_WINDOW]
            if resuming:
                ranked = heapq.merge(resuming, ranked, key=lambda entry: entry[0])
            yield from (entry[1] for entry in ranked)
        elif self._policy.looks_at_cache:
            window = list(itertools.islice(self._arrived, _WINDOW))
            rank, num_cached = self._policy.rank, self._num_cached_tokens
            yield from (entry[1] for entry in sorted([(rank(item, num_cached(item)), item) for item in window]))
        else:
            yield from tuple(itertools.islice(self._arrived, _WINDOW))
