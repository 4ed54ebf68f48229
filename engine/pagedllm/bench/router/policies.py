"""Who gets a request: the real router, and what others do, behind one interface."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...cluster.routing import PrefixRouting, ReplicaLoad, RouteQuery

__all__ = ["POLICIES", "RoutingPolicy", "Told", "make_policy"]


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a replica says with the first token of a request, and with its last.

    Args:
        num_held: Blocks of the prompt that it holds, from the beginning.
        as_of: Number of the change of its cache after which that is so.
        load: What it has to do.
    """

    query: RouteQuery
    replica: str
    num_held: int
    as_of: int
    load: ReplicaLoad


class RoutingPolicy(Protocol):
    """What the simulation tells a router, and asks it."""

    def choose(self, query: RouteQuery) -> str: ...
    def first_token(self, told: Told) -> None: ...
    def finished(self, told: Told) -> None: ...
    def changed(self, replica: str, stored: Sequence[bytes], removed: Sequence[bytes], as_of: int) -> None: ...


class _Prefix:
    """The router as it is."""

    def __init__(self, names: Sequence[str], seed: int, clock: Callable[[], float]) -> None:
        self.routing = PrefixRouting(seed=seed, clock=clock)
        self.routing.set_replicas(names)

    def choose(self, query: RouteQuery) -> str:
        return self.routing.choose(query).replicas[0]

    def first_token(self, told: Told) -> None:
        self._acknowledge(told)
        self.routing.prefilled(told.query.request_id)

    def finished(self, told: Told) -> None:
        self._acknowledge(told)
        self.routing.release(told.query.request_id)

    def changed(self, replica: str, stored: Sequence[bytes], removed: Sequence[bytes], as_of: int) -> None:
        self.routing.update(replica, as_of=as_of, stored=stored, removed=removed)

    def _acknowledge(self, told: Told) -> None:
        held = told.query.chain[: told.num_held]
        self.routing.acknowledge(told.replica, held=held, as_of=told.as_of, load=told.load)


class _Counting:
    """Knows how many of its requests are open where."""

    def __init__(self, names: Sequence[str], seed: int, clock: Callable[[], float]) -> None:  # noqa: ARG002
        self.names = list(names)
        self.num_open = dict.fromkeys(names, 0)
        self.random = random.Random(seed)

    def counted(self, name: str) -> str:
        """The replica, with one more request."""
        self.num_open[name] += 1
        return name

    def first_token(self, told: Told) -> None:
        pass

    def finished(self, told: Told) -> None:
        self.num_open[told.replica] -= 1

    def changed(self, replica: str, stored: Sequence[bytes], removed: Sequence[bytes], as_of: int) -> None:
        pass


class _RoundRobin(_Counting):
    def __init__(self, names: Sequence[str], seed: int, clock: Callable[[], float]) -> None:
        super().__init__(names, seed, clock)
        self._turns = itertools.cycle(self.names)

    def choose(self, query: RouteQuery) -> str:  # noqa: ARG002  the same for all
        return self.counted(next(self._turns))


class _PowerOfTwo(_Counting):
    """The one with fewer open requests of two at random: what Ray Serve does by default."""

    def choose(self, query: RouteQuery) -> str:  # noqa: ARG002  the same for all
        pair = self.random.sample(self.names, min(2, len(self.names)))
        return self.counted(min(pair, key=self.num_open.__getitem__))


class _ConsistentHash(_Counting):
    """By the session, or where there is none by the prompt's first block; however busy that replica is."""

    def choose(self, query: RouteQuery) -> str:
        key = (query.affinity or query.request_id).encode() if query.affinity or not query.chain else query.chain[0]
        return self.counted(
            max(self.names, key=lambda name: hashlib.blake2b(key + name.encode(), digest_size=8).digest())
        )


POLICIES = ("prefix", "round_robin", "power_of_two", "consistent_hash")


def make_policy(name: str, replicas: Sequence[str], seed: int, clock: Callable[[], float]) -> RoutingPolicy:
    """One of ``POLICIES``, on the simulation's clock."""
    kinds: dict[str, Callable[..., RoutingPolicy]] = {
        "prefix": _Prefix,
        "round_robin": _RoundRobin,
        "power_of_two": _PowerOfTwo,
        "consistent_hash": _ConsistentHash,
    }
    return kinds[name](replicas, seed, clock)
