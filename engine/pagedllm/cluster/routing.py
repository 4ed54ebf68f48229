"""Which replica gets a request: the policy, without Ray, so that it is tested and simulated as it is.

A request should go where most of its prompt is cached, unless it would wait there longer than computing the rest takes
elsewhere. Both are counted in the same unit, tokens to compute before its first one: those of its own prompt that are
not cached there, and those of requests that are ahead of it.

Residency is what replicas say: every answer acknowledges how much of its prompt is held now, and replicas tell of
blocks stored and evicted. What a request that is on its way is going to store counts for as long as it is on its way,
so that a burst with a new prefix goes to one replica, which computes it once; it is a reservation and ends with the
request.
"""

from __future__ import annotations

import hashlib
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from .prefix_index import PrefixIndex

__all__ = ["Decision", "PrefixRouting", "ReplicaLoad", "RouteQuery"]

# What a token of the prompt that is not cached weighs beside one that waits ahead of it: it delays this request, and
# then all that come after it. With 1, the second of two requests with the same new prefix would gain by computing it
# once more elsewhere.
_UNCACHED_WEIGHT = 2.0
# What a token of a running sequence weighs. Running sequences make every step longer and take room; with 0, requests
# that are all cached would pile up on one replica.
_RUNNING_WEIGHT = 0.1
# What a token of the recent mean of running tokens weighs. It tells apart replicas that are idle at this moment: a new
# conversation, whose later turns will follow it, belongs where there has been least to do.
# In simulations of 16 and 64 replicas a hard limit to the imbalance, instead, cost hits and time to first token.
_RECENT_WEIGHT = 2.0
_RECENT_S = 120.0
# No request is open for so long: its end was missed, and its reservation is given back.
_MAX_AGE_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class RouteQuery:
    """What the policy has to know of a request.

    Args:
        request_id: Names the reservation.
        num_tokens: Of the prompt.
        block_size: Tokens per block.
        chain: Hashes of the prompt's full blocks.
        affinity: Requests of the same one are sent to the same replicas as long as nothing else decides.
        excluded: Replicas that must not get it.
    """

    request_id: str
    num_tokens: int
    block_size: int
    chain: Sequence[bytes] = ()
    affinity: str | None = None
    excluded: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class ReplicaLoad:
    """What a replica says about itself.

    Args:
        num_queued_tokens: Prompt tokens that it has yet to compute.
        num_running_tokens: Tokens of all its open requests.
    """

    num_queued_tokens: int = 0
    num_running_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Where a request goes.

    Args:
        replicas: Best first; the first has the reservation. Empty if there is none.
        num_matched_tokens: Of the prompt, found at the first.
    """

    replicas: tuple[str, ...]
    num_matched_tokens: int = 0


@dataclass
class _Reservation:
    """What a request holds of a replica.

    Args:
        num_uncached: Prompt tokens to be computed; 0 once they are.
        promised: Blocks that it is going to store.
        made_at: When, on the monotonic clock.
    """

    replica: str
    query: RouteQuery
    num_uncached: int
    promised: Sequence[bytes]
    made_at: float


@dataclass
class _Replica:
    """Account of one replica.

    Args:
        as_of: Up to which of its changes its residency is known.
        recent: Running tokens, averaged over the last two minutes or so (exponentially), at ``averaged_at``.
        queued: Tokens that our own requests have yet to compute there.
        running: Tokens of our own open requests.
        reported: What it said itself; includes requests of others.
    """

    as_of: int = -1
    queued: int = 0
    running: int = 0
    reported: ReplicaLoad = field(default_factory=ReplicaLoad)
    recent: float = 0.0
    averaged_at: float = 0.0

    def average(self, now: float) -> None:
        """Bring ``recent`` up to now; what runs has been running since the last time."""
        kept = math.exp((self.averaged_at - now) / _RECENT_S)
        self.recent = self.recent * kept + self.running_tokens * (1 - kept)
        self.averaged_at = now

    @property
    def queued_tokens(self) -> int:
        return max(self.queued, self.reported.num_queued_tokens)

    @property
    def running_tokens(self) -> int:
        return max(self.running, self.reported.num_running_tokens)


class PrefixRouting:
    """Decides, and keeps the accounts that decisions need. Safe from many threads.

    ``choose`` decides and reserves in one step, so that requests which arrive together see each other.

    Args:
        seed: Of the choice among replicas that nothing tells apart.
        clock: Seconds on a clock that never goes back.
    """

    def __init__(self, *, seed: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._index = PrefixIndex()
        self._replicas: dict[str, _Replica] = {}
        self._reservations: dict[str, _Reservation] = {}
        self._promises: dict[bytes, int] = {}
        self._promise_counts: dict[tuple[bytes, str], int] = {}
        self._random = random.Random(seed)

    @property
    def replicas(self) -> tuple[str, ...]:
        """Those that requests may go to."""
        with self._lock:
            return tuple(self._replicas)

    @property
    def num_blocks(self) -> int:
        """Blocks known to be held somewhere."""
        with self._lock:
            return len(self._index)

    def running_tokens(self) -> dict[str, int]:
        """Tokens of the open requests of each replica."""
        with self._lock:
            return {name: replica.running_tokens for name, replica in self._replicas.items()}

    # --- Replicas ---

    def set_replicas(self, names: Iterable[str]) -> None:
        """These are the replicas now: others are forgotten, new ones hold nothing."""
        wanted = set(names)
        with self._lock:
            for name in [name for name in self._replicas if name not in wanted]:
                self._forget(name)
            for name in sorted(wanted - set(self._replicas)):
                self._replicas[name] = _Replica(averaged_at=self._clock())
                self._index.add_replica(name)

    def forget(self, name: str) -> None:
        """The replica is dead: no request goes there, and what it held is gone."""
        with self._lock:
            if name in self._replicas:
                self._forget(name)

    def update(
        self,
        name: str,
        *,
        as_of: int,
        stored: Iterable[bytes] = (),
        removed: Iterable[bytes] = (),
        is_snapshot: bool = False,
        load: ReplicaLoad | None = None,
    ) -> None:
        """What changed at a replica since its last update.

        Args:
            as_of: Number of the last change that is in here.
            is_snapshot: Whether ``stored`` is all that it holds.
        """
        with self._lock:
            replica = self._replicas.get(name)
            if replica is None:
                return  # forgotten while the update was on its way
            if load is not None:
                replica.reported = load
            if as_of < replica.as_of:
                return
            if is_snapshot:
                self._index.clear_replica(name)
            self._index.remove(name, removed)
            self._index.store(name, stored)
            replica.as_of = as_of

    def acknowledge(self, name: str, *, held: Iterable[bytes], as_of: int, load: ReplicaLoad) -> None:
        """A replica says that it holds these blocks, as of one of its changes, and how much it has to do.

        If later changes are known already, they know better.
        """
        with self._lock:
            replica = self._replicas.get(name)
            if replica is None:
                return
            replica.reported = load
            if as_of >= replica.as_of:
                self._index.store(name, held)

    # --- Requests ---

    def choose(self, query: RouteQuery) -> Decision:
        """Decide where a request goes, and reserve it there; a reservation that it has already is given back."""
        with self._lock:
            self._release(query.request_id)
            self._expire()
            candidates = self._candidates(query)
            if not candidates:
                return Decision(replicas=())
            matched = self._index.match(query.chain, self._promises)
            ranked = self._rank(query, candidates, matched)
            num_matched = matched.get(ranked[0], 0)
            self._reserve(ranked[0], query, num_matched)
            return Decision(replicas=tuple(ranked), num_matched_tokens=num_matched * query.block_size)

    def moved(self, request_id: str, name: str) -> None:
        """The request went to another replica than the one it was reserved at."""
        with self._lock:
            reservation = self._reservations.get(request_id)
            if reservation is None or reservation.replica == name or name not in self._replicas:
                return
            query = reservation.query
            self._release(request_id)
            self._reserve(name, query, self._index.match(query.chain).get(name, 0))

    def prefilled(self, request_id: str) -> None:
        """The request's prompt is computed: it is no longer ahead of others."""
        with self._lock:
            reservation = self._reservations.get(request_id)
            if reservation is not None:
                self._replicas[reservation.replica].queued -= reservation.num_uncached
                reservation.num_uncached = 0
                self._break_promises(reservation)

    def release(self, request_id: str) -> None:
        """The request has ended, however it did. Nothing happens if it holds nothing."""
        with self._lock:
            self._release(request_id)

    def check_integrity(self) -> None:
        """Recount everything from the reservations; raises AssertionError on any disagreement."""
        with self._lock:
            for name, replica in self._replicas.items():
                mine = [item for item in self._reservations.values() if item.replica == name]
                assert replica.queued == sum(item.num_uncached for item in mine), f"{name}: queued tokens"
                assert replica.running == sum(item.query.num_tokens for item in mine), f"{name}: running tokens"
            promised = {(block, item.replica) for item in self._reservations.values() for block in item.promised}
            assert promised == set(self._promise_counts), "promises without a reservation"
            assert set(self._promises) == {block for block, _ in promised}
            assert all(item.replica in self._replicas for item in self._reservations.values())

    # --- Inside, under the lock ---

    def _candidates(self, query: RouteQuery) -> list[str]:
        return [name for name in self._replicas if name not in query.excluded]

    def _rank(self, query: RouteQuery, names: Sequence[str], matched: dict[str, int]) -> list[str]:
        """Those that have something of the prompt, and two others, by what is to be computed before the first token."""
        pair = self._pair(query, names)
        now = self._clock()
        for name in names:
            self._replicas[name].average(now)
        allowed = set(names)
        costs = {name: self._cost(query, name, matched.get(name, 0)) for name in pair}
        for name, num_blocks in matched.items():
            if name in allowed:
                costs[name] = self._cost(query, name, num_blocks)
        # The order of equal ones is that of the pair, which affinity has a say in.
        return sorted(costs, key=costs.__getitem__)

    def _pair(self, query: RouteQuery, names: Sequence[str]) -> Sequence[str]:
        """Two replicas at random, or the two that an affinity always gives (highest random weight first)."""
        if len(names) <= 2 and query.affinity is None:
            return self._random.sample(names, len(names))
        if query.affinity is None:
            return self._random.sample(names, 2)
        key = query.affinity.encode()
        return sorted(names, key=lambda name: hashlib.blake2b(name.encode(), key=_key_of(key)).digest())[:2]

    def _cost(self, query: RouteQuery, name: str, num_matched: int) -> float:
        replica = self._replicas[name]
        num_uncached = query.num_tokens - num_matched * query.block_size
        busy = _RUNNING_WEIGHT * replica.running_tokens + _RECENT_WEIGHT * replica.recent
        return _UNCACHED_WEIGHT * num_uncached + replica.queued_tokens + busy

    def _reserve(self, name: str, query: RouteQuery, num_matched: int) -> None:
        num_uncached = query.num_tokens - num_matched * query.block_size
        reservation = _Reservation(name, query, num_uncached, query.chain[num_matched:], self._clock())
        self._reservations[query.request_id] = reservation
        replica = self._replicas[name]
        replica.queued += num_uncached
        replica.running += query.num_tokens
        bit = self._index.slot_bit(name)
        for block_hash in reservation.promised:
            self._promises[block_hash] = self._promises.get(block_hash, 0) | bit
            self._promise_counts[block_hash, name] = self._promise_counts.get((block_hash, name), 0) + 1

    def _release(self, request_id: str) -> None:
        reservation = self._reservations.pop(request_id, None)
        if reservation is not None:
            replica = self._replicas[reservation.replica]
            replica.queued -= reservation.num_uncached
            replica.running -= reservation.query.num_tokens
            self._break_promises(reservation)

    def _expire(self) -> None:
        """Give back the oldest reservation if it is too old; they are in the order in which they were made."""
        oldest = next(iter(self._reservations.values()), None)
        if oldest is not None and self._clock() - oldest.made_at > _MAX_AGE_S:
            self._release(oldest.query.request_id)

    def _break_promises(self, reservation: _Reservation) -> None:
        bit = self._index.slot_bit(reservation.replica)
        for block_hash in reservation.promised:
            key = (block_hash, reservation.replica)
            self._promise_counts[key] -= 1
            if self._promise_counts[key] == 0:
                del self._promise_counts[key]
                self._promises[block_hash] &= ~bit
                if not self._promises[block_hash]:
                    del self._promises[block_hash]
        reservation.promised = ()

    def _forget(self, name: str) -> None:
        for request_id in [key for key, item in self._reservations.items() if item.replica == name]:
            self._release(request_id)
        self._index.forget_replica(name)
        del self._replicas[name]


def _key_of(affinity: bytes) -> bytes:
    return hashlib.sha256(affinity).digest()
