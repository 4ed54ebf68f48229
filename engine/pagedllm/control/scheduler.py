"""Continuous batching: every step admits, advances and retires sequences under one token budget."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as List
from dataclasses import dataclass

from ..errors import ContextLengthError
from .kv_cache_manager import KVCacheManager
from .sequence import Sequence

__all__ = ["ScheduledSequence", "Scheduler", "SchedulerOutput"]


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A sequence and how many of its tokens this step computes."""

    sequence: Sequence
    num_new_tokens: int

    @property
    def reaches_end(self) -> bool:
        """Whether the step computes its last known token, so that a new one is sampled."""
        return self.num_new_tokens == self.sequence.num_uncomputed_tokens


@dataclass(frozen=True, kw_only=True)
class SchedulerOutput:
    """What one step does. ``sampled`` are the sequences that get a new token, in batch order."""

    scheduled: tuple[ScheduledSequence, ...]
    sampled: tuple[Sequence, ...]
    num_admitted: int
    num_preempted: int

    @property
    def num_tokens(self) -> int:
        return sum(item.num_new_tokens for item in self.scheduled)


class Scheduler:
    """First come, first served, with chunked prefill, and preemption by recompute when the pool runs dry.

    Running sequences come first, in order of arrival, each with all it is behind or what the token budget leaves;
    then waiting ones are admitted while budget, seats and blocks last. When a running sequence finds no block, the
    one that arrived last gives its blocks back and waits again at the head of the queue. The oldest sequence is
    therefore never preempted, and as nothing is admitted that could not run alone, it always finishes.

    Args:
        kv_cache_manager: Owns the blocks.
        max_num_seqs: Most sequences in one step.
        max_num_batched_tokens: Token budget of one step; at least ``max_num_seqs``.
    """

    def __init__(self, kv_cache_manager: KVCacheManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        assert max_num_batched_tokens >= max_num_seqs
        self.kv_cache_manager = kv_cache_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        self.num_running_peak = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            ContextLengthError: It could never fit, even alone.
        """
        manager = self.kv_cache_manager
        num_needed = manager.num_blocks_for(sequence.max_num_tokens)
        if num_needed > manager.pool.num_blocks:
            raise ContextLengthError(
                f"{sequence.num_prompt_tokens} prompt tokens and max_tokens={sequence.max_tokens} need {num_needed} "
                f"KV blocks of {manager.block_size} tokens, but the whole pool has {manager.pool.num_blocks}; shorten "
                "the prompt, lower max_tokens or raise kv_cache_memory_bytes",
                param="max_tokens",
            )
        self.waiting.append(sequence)

    def schedule(self) -> SchedulerOutput:
        """Choose this step's work and give each chosen sequence the blocks it writes."""
        scheduled: list[ScheduledSequence] = []
        num_preemptions = self.num_preemptions
        budget = self._schedule_running(scheduled, self.max_num_batched_tokens)
        num_continued = len(scheduled)
        if self.num_preemptions == num_preemptions:
            # Admitting in a step that preempted would hand the freed blocks to someone who came later.
            self._admit_waiting(scheduled, budget)
        self.num_running_peak = max(self.num_running_peak, len(self.running))
        return SchedulerOutput(
            scheduled=tuple(scheduled),
            sampled=tuple(item.sequence for item in scheduled if item.reaches_end),
            num_admitted=len(scheduled) - num_continued,
            num_preempted=self.num_preemptions - num_preemptions,
        )

    def update(self, output: SchedulerOutput, token_ids: List[int]) -> None:
        """Record a step that has run: progress, published blocks, and one token for each sampled sequence."""
        now = time.monotonic()
        for item in output.scheduled:
            item.sequence.num_computed_tokens += item.num_new_tokens
            self.kv_cache_manager.publish(item.sequence)
        for sequence, token_id in zip(output.sampled, token_ids, strict=True):
            sequence.append(token_id)
            if sequence.first_token_time is None:
                sequence.first_token_time = now

    def retire_finished(self) -> int:
        """Free what finished sequences hold and forget them; returns how many there were."""
        finished = [sequence for sequence in self.running if sequence.is_finished]
        for sequence in finished:
            self.kv_cache_manager.free(sequence)
        self.running = [sequence for sequence in self.running if not sequence.is_finished]
        return len(finished)

    def abort(self, request_id: str) -> list[Sequence]:
        """End all sequences of a request, running or waiting; returns them."""
        aborted = [item for item in (*self.running, *self.waiting) if item.request_id == request_id]
        for sequence in aborted:
            sequence.finish("abort")
        self.waiting = deque(item for item in self.waiting if not item.is_finished)
        self.retire_finished()
        return aborted

    def check_integrity(self) -> None:
        """Verify that exactly the running sequences hold blocks, and that none is lost."""
        assert all(not sequence.block_table and not sequence.nodes for sequence in self.waiting)
        self.kv_cache_manager.check_integrity(self.running)

    def _schedule_running(self, scheduled: list[ScheduledSequence], budget: int) -> int:
        position = 0
        while budget > 0 and position < len(self.running):  # preemption shortens the list from its end
            sequence = self.running[position]
            num_new_tokens = min(sequence.num_uncomputed_tokens, budget)
            if not self._allocate_or_preempt(sequence, num_new_tokens):
                break
            scheduled.append(ScheduledSequence(sequence, num_new_tokens))
            budget -= num_new_tokens
            position += 1
        return budget

    def _allocate_or_preempt(self, sequence: Sequence, num_new_tokens: int) -> bool:
        """Preempt from the end of the line until the sequence has its blocks; False if it was itself the end."""
        while not self.kv_cache_manager.allocate(sequence, num_new_tokens):
            victim = self.running.pop()
            self.kv_cache_manager.free(victim)
            self.waiting.appendleft(victim)
            self.num_preemptions += 1
            if victim is sequence:
                return False
        return True

    def _admit_waiting(self, scheduled: list[ScheduledSequence], budget: int) -> None:
        now = time.monotonic()
        followers: list[Sequence] = []
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting.popleft()
            if self._waits_for_leader(sequence):
                followers.append(sequence)
                continue
            if not self.kv_cache_manager.admit(sequence):
                self.waiting.appendleft(sequence)
                break
            num_new_tokens = min(sequence.num_uncomputed_tokens, budget)
            if not self.kv_cache_manager.allocate(sequence, num_new_tokens):
                raise AssertionError("admit() promised room for all known tokens")
            self.running.append(sequence)
            if sequence.first_scheduled_time is None:
                sequence.first_scheduled_time = now
            scheduled.append(ScheduledSequence(sequence, num_new_tokens))
            budget -= num_new_tokens
        self.waiting.extendleft(reversed(followers))

    def _waits_for_leader(self, sequence: Sequence) -> bool:
        """Whether it should wait a step or more for prompt blocks that its request's first choice is computing.

        A leader that is not running (finished, aborted or preempted) will not provide them any more.
        """
        leader = sequence.leader
        return leader is not None and bool(leader.block_table) and not leader.is_prompt_computed
