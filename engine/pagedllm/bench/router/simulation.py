"""Replicas without a model: the real scheduler, KV cache and router on a clock that jumps from event to event."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Sequence as List
from dataclasses import dataclass, field

from ...api import CacheHints, SamplingParams
from ...cluster.routing import ReplicaLoad, RouteQuery
from ...control.block_hash import block_hashes
from ...control.kv_cache_manager import KVCacheManager
from ...control.kv_events import KVEvent
from ...control.policies import POLICIES as SCHEDULING_POLICIES
from ...control.scheduler import Scheduler, SchedulerOutput
from ...control.sequence import Sequence
from .costs import StepCosts
from .policies import RoutingPolicy, Told, make_policy
from .traces import TraceRequest

__all__ = ["ReplicaPlan", "Served", "SimulationResult", "simulate"]

_EOS = -1


@dataclass(frozen=True, kw_only=True)
class ReplicaPlan:
    """What each simulated engine is.

    Args:
        costs: How long its steps take.
        num_blocks: Size of its KV pool.
        block_size: Tokens per block.
        max_num_seqs: Most sequences in one step.
        max_num_batched_tokens: Token budget of one step.
    """

    costs: StepCosts
    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512


@dataclass(frozen=True, kw_only=True)
class Served:
    """What one request got.

    Args:
        ttft_s: From its arrival to its first token.
        total_s: From its arrival to its last token.
    """

    replica: str
    num_prompt_tokens: int
    num_cached_tokens: int
    ttft_s: float
    total_s: float


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """What one routing policy made of a trace.

    Args:
        running_tokens: Mean over time of the tokens of open requests, of each replica.
        decision_s: Real time that each decision took.
        num_held_blocks: In all caches at the end, which is what a router has to know.
        duration_s: Simulated, from the first arrival to the last token.
    """

    policy: str
    served: tuple[Served, ...]
    running_tokens: tuple[float, ...]
    decision_s: tuple[float, ...]
    num_held_blocks: int
    duration_s: float


@dataclass(eq=False)
class _Open:
    """A request at a replica."""

    request: TraceRequest
    query: RouteQuery
    sequence: Sequence
    first_token_s: float | None = None


@dataclass
class _Replica:
    """An engine whose steps take the time that they would take."""

    name: str
    plan: ReplicaPlan
    now: float = 0.0
    output: SchedulerOutput | None = None
    open: dict[str, _Open] = field(default_factory=dict)
    as_of: int = 0
    stored: list[bytes] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)
    token_seconds: float = 0.0

    def __post_init__(self) -> None:
        manager = KVCacheManager(num_blocks=self.plan.num_blocks, block_size=self.plan.block_size)
        manager.prefix_cache.listen(self._note)
        self.held: set[bytes] = set()
        self.scheduler = Scheduler(
            manager,
            max_num_seqs=self.plan.max_num_seqs,
            max_num_batched_tokens=self.plan.max_num_batched_tokens,
            policy=SCHEDULING_POLICIES["fcfs"],
            clock=lambda: self.now,
        )

    def add(self, opened: _Open) -> None:
        self.open[opened.query.request_id] = opened
        self.scheduler.add([opened.sequence])

    def begin_step(self, now: float) -> float:
        """Start a step; returns when it ends."""
        self.now = now
        self.output = self.scheduler.schedule()
        num_prompt = self.output.num_prefill_tokens
        return now + self.plan.costs.duration(num_prompt, self.output.num_tokens - num_prompt)

    def end_step(self, now: float) -> tuple[list[_Open], list[_Open]]:
        """Finish it; returns the requests that got their first token, and those that ended."""
        assert self.output is not None
        self.now = now
        self.scheduler.update(self.output, [1] * len(self.output.sampled))
        begun, ended = [], []
        for sequence in self.output.sampled:
            opened = self.open[sequence.request_id]
            if opened.first_token_s is None:
                opened.first_token_s = now
                begun.append(opened)
            if sequence.is_finished:
                ended.append(self.open.pop(sequence.request_id))
        self.scheduler.retire_finished()
        self.output = None
        return begun, ended

    def num_held(self, chain: List[bytes]) -> int:
        return next((place for place, block in enumerate(chain) if block not in self.held), len(chain))

    def load(self) -> ReplicaLoad:
        waiting = [item for item in self.open.values() if item.first_token_s is None]
        return ReplicaLoad(
            num_queued_tokens=sum(
                item.sequence.num_prompt_tokens - item.sequence.num_computed_tokens for item in waiting
            ),
            num_running_tokens=sum(item.query.num_tokens for item in self.open.values()),
        )

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """What the cache stored, and what it dropped, since this was last asked."""
        changes = self.stored, self.removed
        self.stored, self.removed = [], []
        return changes

    def _note(self, event: KVEvent) -> None:
        self.as_of += 1
        if event.kind == "stored":
            self.held.add(event.block_hash)
            self.stored.append(event.block_hash)
        else:
            self.held.discard(event.block_hash)
            self.removed.append(event.block_hash)


def simulate(
    trace: List[TraceRequest], plan: ReplicaPlan, *, policy: str, num_replicas: int, seed: int = 0
) -> SimulationResult:
    """Send a trace through a routing policy to replicas that begin with empty caches."""
    return _Simulation(trace, plan, policy, num_replicas, seed).run()


class _Simulation:
    def __init__(self, trace: List[TraceRequest], plan: ReplicaPlan, policy: str, num_replicas: int, seed: int) -> None:
        self._trace, self._plan, self._policy_name = trace, plan, policy
        names = [f"replica-{index}" for index in range(num_replicas)]
        self._replicas = {name: _Replica(name, plan) for name in names}
        self._now = 0.0
        self._policy: RoutingPolicy = make_policy(policy, names, seed, lambda: self._now)
        self._served: list[Served] = []
        self._decision_s: list[float] = []
        # Time, a number that keeps equal times in order, and what happens: a request or the name of a replica.
        self._events: list[tuple[float, int, TraceRequest | str]] = []
        self._numbers = itertools.count()

    def run(self) -> SimulationResult:
        for request in self._trace:
            self._at(request.arrival_s, request)
        now = begin = self._trace[0].arrival_s
        while self._events:
            then, _, event = heapq.heappop(self._events)
            for replica in self._replicas.values():
                if replica.open:
                    tokens = sum(item.sequence.num_tokens for item in replica.open.values())
                    replica.token_seconds += tokens * (then - now)
            self._now = now = then
            if isinstance(event, TraceRequest):
                self._arrive(event, now)
            else:
                self._finish_step(self._replicas[event], now)
        duration_s = now - begin
        return SimulationResult(
            policy=self._policy_name,
            served=tuple(self._served),
            running_tokens=tuple(item.token_seconds / duration_s for item in self._replicas.values()),
            decision_s=tuple(self._decision_s),
            num_held_blocks=sum(len(item.held) for item in self._replicas.values()),
            duration_s=duration_s,
        )

    def _at(self, when: float, event: TraceRequest | str) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def _arrive(self, request: TraceRequest, now: float) -> None:
        token_ids, name = request.token_ids(), f"request-{next(self._numbers)}"
        query = RouteQuery(
            request_id=name,
            num_tokens=len(token_ids),
            block_size=self._plan.block_size,
            chain=block_hashes(token_ids, self._plan.block_size, None),
            affinity=request.session,
        )
        start = time.perf_counter()
        replica = self._replicas[self._policy.choose(query)]
        self._decision_s.append(time.perf_counter() - start)
        sequence = Sequence(
            request_id=name,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            max_tokens=request.output_len,
            sampling=SamplingParams(max_tokens=request.output_len, ignore_eos=True),
            seed=0,
            eos_token_ids=frozenset({_EOS}),
            hints=CacheHints(),
            arrival_time=now,
        )
        replica.add(_Open(request, query, sequence))
        self._begin_step(replica, now)

    def _begin_step(self, replica: _Replica, now: float) -> None:
        if replica.output is None and replica.scheduler.has_work:
            self._at(replica.begin_step(now), replica.name)

    def _finish_step(self, replica: _Replica, now: float) -> None:
        begun, ended = replica.end_step(now)
        stored, removed = replica.take_changes()
        if stored or removed:
            kept = [block for block in stored if block in replica.held]
            gone = [block for block in removed if block not in replica.held]
            self._policy.changed(replica.name, kept, gone, replica.as_of)
        load = replica.load()
        for tell, requests in ((self._policy.first_token, begun), (self._policy.finished, ended)):
            for opened in requests:
                query, num_held = opened.query, replica.num_held(opened.query.chain)
                tell(Told(query=query, replica=replica.name, num_held=num_held, as_of=replica.as_of, load=load))
        for opened in ended:
            assert opened.first_token_s is not None
            self._served.append(
                Served(
                    replica=replica.name,
                    num_prompt_tokens=opened.query.num_tokens,
                    num_cached_tokens=opened.sequence.num_cached_tokens or 0,
                    ttft_s=opened.first_token_s - opened.request.arrival_s,
                    total_s=now - opened.request.arrival_s,
                )
            )
        self._begin_step(replica, now)
