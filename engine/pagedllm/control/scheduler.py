"""Continuous batching: every step admits, advances and retires sequences under one token budget."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass

from ..errors import ContextLengthError, QueueFullError
from .hint_keeper import HintKeeper
from .host_tier import BlockCopy
from .kv_cache_manager import KVCacheManager
from .policies import POLICIES, Policy
from .sequence import Sequence
from .step_cost import StepCost
from .swap_choice import SwapChoice
from .waiting_queue import WaitingQueue

__all__ = ["Scheduler", "SchedulerOutput"]


# How many of those who wait are asked, in a step that has no room for them, whether they wait for somebody's prefix.
_MAX_LENDERS = 8
_MAX_ASKED_PER_SEAT = 4  # of those who wait, in a step that has room


@dataclass(frozen=True, kw_only=True)
class SchedulerOutput:
    """What one step does.

    Args:
        sequences: Whose tokens it computes.
        nums_new_tokens: How many tokens of each.
        sampled: The sequences that get a new token, in batch order.
        copies: KV blocks to copy, one after the other, before anything is computed.
    """

    sequences: tuple[Sequence, ...]
    nums_new_tokens: tuple[int, ...]
    sampled: tuple[Sequence, ...]
    copies: tuple[BlockCopy, ...]
    num_admitted: int
    num_preempted: int

    @property
    def num_tokens(self) -> int:
        return sum(self.nums_new_tokens)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prompts, and of what is computed again."""
        return sum(number for number in self.nums_new_tokens if number > 1)


@dataclass(slots=True)
class _Work:
    """The lists of a step's output while they grow."""

    sequences: list[Sequence]
    nums_new_tokens: list[int]
    sampled: list[Sequence]

    def add(self, sequence: Sequence, num_new_tokens: int, num_behind: int) -> None:
        """Compute so many tokens of a sequence; where that is all it is behind, a new one is sampled."""
        self.sequences.append(sequence)
        self.nums_new_tokens.append(num_new_tokens)
        if num_new_tokens == num_behind and sequence.generates:
            self.sampled.append(sequence)


class Scheduler:
    """Chunked prefill and decode in one batch, in the order of a policy, with preemption when the pool runs dry.

    Running sequences come first, in order of rank, each with all it is behind or what the token budget leaves; then
    waiting ones are admitted while budget, seats and blocks last. When a running sequence finds no block, one behind it
    gives its blocks back and waits. The best in rank is therefore never preempted, and as nothing is admitted that
    could not run alone, it always finishes.

    A sequence that came back from preemption is spared until it has as many new tokens as a block holds: it is
    admitted only with a block in reserve for everyone who runs, and as long as it is spared so is everyone else.

    Args:
        kv_cache_manager: Owns the blocks.
        max_num_seqs: Most sequences in one step.
        max_num_batched_tokens: Token budget of one step; at least ``max_num_seqs``.
        policy: In which order.
        max_num_queued_requests: Most requests that wait for their first step; None for any number.
        swap_choice: How to preempt.
        step_cost: Holds long prompts back while others decode; None to compute them as fast as the budget allows.
        clock: Seconds on a clock that never goes back.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: Policy = POLICIES["fcfs"],
        max_num_queued_requests: int | None = None,
        swap_choice: SwapChoice | None = None,
        step_cost: StepCost | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert max_num_batched_tokens >= max_num_seqs
        self.kv_cache_manager = kv_cache_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_queued_requests = max_num_queued_requests
        self.policy = policy
        self.clock = clock
        self.swap_choice = swap_choice or SwapChoice()
        self.step_cost = step_cost
        self.hint_keeper = HintKeeper(kv_cache_manager, policy)
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue(policy, self._num_matched_tokens)
        self.preemptions: Counter[str] = Counter()
        self.num_running_peak = 0
        self._is_sorted = True
        # Of those that run, the ones that are behind by more than the token just sampled.
        self._prefilling: list[Sequence] = []
        self.num_waits_for_prefix = 0
        self.num_refused = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or len(self.waiting))

    @property
    def num_preemptions(self) -> int:
        return self.preemptions["swap"] + self.preemptions["recompute"]

    def add(self, sequences: List[Sequence]) -> None:
        """Queue a request's sequences, the leader first.

        Raises:
            ContextLengthError: They could never fit, even alone.
            QueueFullError: As many requests wait as may.
        """
        manager, leader = self.kv_cache_manager, sequences[0]
        num_needed = manager.num_blocks_for(leader.max_num_tokens)
        if num_needed > manager.pool.num_blocks:
            raise ContextLengthError(
                f"{leader.num_prompt_tokens} prompt tokens and max_tokens={leader.max_tokens} need {num_needed} "
                f"KV blocks of {manager.block_size} tokens, but the whole pool has {manager.pool.num_blocks}; shorten "
                "the prompt, lower max_tokens or raise kv_cache_memory_bytes",
                param="max_tokens",
            )
        limit = self.max_num_queued_requests
        if limit is not None and self.waiting.num_requests >= limit:
            self.num_refused += 1
            raise QueueFullError(f"{limit} requests are waiting already (max_num_queued_reqs={limit}); try again later")
        manager.prefix_cache.now = self.clock()
        for sequence in sequences:
            self.waiting.add(sequence)
            self.hint_keeper.on_arrival(sequence)

    def schedule(self) -> SchedulerOutput:
        """Choose this step's work and give each chosen sequence the blocks it writes."""
        manager = self.kv_cache_manager
        manager.prefix_cache.now = self.clock()
        manager.pins.expire()
        if self.step_cost is not None:
            self.step_cost.begin_step()
        work = _Work([], [], [])
        num_preemptions = self.num_preemptions
        budget = self._schedule_running(work, self.max_num_batched_tokens)
        num_continued = len(work.sequences)
        if self.num_preemptions == num_preemptions:
            # Admitting in a step that preempted would hand the freed blocks to someone who came later.
            self._admit_waiting(work, budget)
        self.num_running_peak = max(self.num_running_peak, len(self.running))
        return SchedulerOutput(
            sequences=tuple(work.sequences),
            nums_new_tokens=tuple(work.nums_new_tokens),
            sampled=tuple(work.sampled),
            copies=manager.host.take_copies(),
            num_admitted=len(work.sequences) - num_continued,
            num_preempted=self.num_preemptions - num_preemptions,
        )

    def update(self, output: SchedulerOutput, token_ids: List[int]) -> None:
        """Record a step that has run: progress, published blocks, and one token for each sampled sequence."""
        now = self.clock()
        publish, block_size = self.kv_cache_manager.publish, self.kv_cache_manager.block_size
        for sequence, num_new_tokens in zip(output.sequences, output.nums_new_tokens, strict=True):
            num_computed = sequence.num_computed_tokens = sequence.num_computed_tokens + num_new_tokens
            if num_computed % block_size < num_new_tokens:  # a block became full
                publish(sequence)
            if 0 <= num_computed - sequence.num_prompt_tokens < num_new_tokens:
                self.hint_keeper.on_prompt_computed(sequence)
                if not sequence.generates:
                    sequence.finish("length")
        for sequence, token_id in zip(output.sampled, token_ids, strict=True):
            sequence.append(token_id)
            if sequence.first_token_time is None:
                sequence.first_token_time = now

    def retire_finished(self) -> int:
        """Free what finished sequences hold and forget them; returns how many there were."""
        finished = [sequence for sequence in self.running if sequence.finish_reason is not None]
        for sequence in finished:
            self.kv_cache_manager.free(sequence)
        if finished:
            self.running = [sequence for sequence in self.running if not sequence.is_finished]
        return len(finished)

    def abort(self, request_id: str) -> list[Sequence]:
        """End all sequences of a request, running or waiting; returns them."""
        running = [sequence for sequence in self.running if sequence.request_id == request_id]
        waiting = [sequence for sequence in self.waiting if sequence.request_id == request_id]
        for sequence in waiting:
            self.waiting.remove(sequence)
            self.kv_cache_manager.free(sequence)
        for sequence in (*running, *waiting):
            sequence.finish("abort")
        self.retire_finished()
        return [*running, *waiting]

    def check_integrity(self) -> None:
        """Verify that exactly the running sequences hold device blocks, and that none is lost."""
        self.kv_cache_manager.check_integrity(self.running, self.waiting)

    # --- Those that run ---

    def _schedule_running(self, work: _Work, budget: int) -> int:
        if not self._is_sorted:
            self.running.sort(key=self.policy.rank_of_running)
            for sequence in self.running:
                sequence.lent_rank = None
            self._is_sorted = True
        running, add, prefilling = self.running, work.add, []
        allocate = self.kv_cache_manager.allocate
        position = 0
        while budget > 0 and position < len(running):  # preemption shortens the list behind the position
            sequence = running[position]
            num_computed = sequence.num_computed_tokens
            num_behind = num_new_tokens = len(sequence.token_ids) - num_computed
            if num_behind == 1 and num_computed < sequence.num_writable_tokens:
                # Nearly all sequences in nearly every step; what is below would do the same, in twice the time.
                add(sequence, 1, 1)
                budget -= 1
                position += 1
                continue
            if num_behind > 1:
                num_new_tokens = self._hold_back(sequence, min(num_behind, budget))
            is_ready = num_new_tokens == 0 or num_computed + num_new_tokens <= sequence.num_writable_tokens
            if not (is_ready or allocate(sequence, num_new_tokens) or self._preempt_for(position, num_new_tokens)):
                continue  # it was itself the one to give way
            if num_behind > 1:
                prefilling.append(sequence)
            position += 1
            if num_new_tokens:
                add(sequence, num_new_tokens, num_behind)
                budget -= num_new_tokens
        prefilling += [sequence for sequence in running[position:] if sequence.num_uncomputed_tokens > 1]
        self._prefilling = prefilling
        return budget

    def _preempt_for(self, position: int, num_new_tokens: int) -> bool:
        """Preempt others until a running sequence has its blocks; False if it was itself preempted."""
        sequence = self.running[position]
        while not self.kv_cache_manager.allocate(sequence, num_new_tokens):
            if len(self.running) == 1 and self.kv_cache_manager.pins.give_way():
                continue
            victim = self._victim(position)
            self._preempt(victim, cause="prefill" if num_new_tokens > 1 else "decode")
            if victim is sequence:
                return False
        return True

    def _victim(self, position: int) -> Sequence:
        """The last in rank, from a position on, that is not spared; or, if all are, the last of all.

        Never the best of several, whoever is spared: it is what guarantees progress.
        """
        candidates = [sequence for sequence in self.running[max(position, 1) :] if not self._is_spared(sequence)]
        return candidates[-1] if candidates else self.running[-1]

    def _is_spared(self, sequence: Sequence) -> bool:
        start = sequence.num_tokens_when_resumed
        return start is not None and sequence.num_tokens - start < self.kv_cache_manager.block_size

    def _preempt(self, victim: Sequence, cause: str) -> None:
        manager = self.kv_cache_manager
        swaps = self.swap_choice.prefers_swap(len(victim.block_table), victim.num_computed_tokens)
        if swaps and manager.swap_out(victim):
            self.preemptions["swap"] += 1
        else:
            manager.free(victim, is_worth_keeping=swaps)
            self.preemptions["recompute"] += 1
        self.preemptions[cause] += 1
        self.running.remove(victim)
        self.waiting.add_preempted(victim)
        victim.num_tokens_when_resumed = victim.num_tokens  # and is set again when it resumes

    # --- Those that wait ---

    def _admit_waiting(self, work: _Work, budget: int) -> None:
        if not len(self.waiting):
            return
        if budget <= 0 or len(self.running) >= self.max_num_seqs:
            if self.policy.uses_priority and self._prefilling:
                for sequence in itertools.islice(self.waiting.in_order(), _MAX_LENDERS):
                    self._waits_for_another(sequence)
            return
        now = self.clock()
        for sequence in itertools.islice(self.waiting.in_order(), _MAX_ASKED_PER_SEAT * self.max_num_seqs):
            if budget <= 0 or len(self.running) >= self.max_num_seqs:
                break
            if self._waits_for_another(sequence) or self._is_held_back(sequence):
                continue
            if not self._admit(sequence):
                break
            num_behind = sequence.num_uncomputed_tokens
            num_new_tokens = self._hold_back(sequence, min(num_behind, budget))
            if not self.kv_cache_manager.allocate(sequence, num_new_tokens):
                raise AssertionError("admit() promised room for all known tokens")
            self.waiting.remove(sequence)
            self.running.append(sequence)
            self._prefilling.append(sequence)
            self._is_sorted = False
            if sequence.first_scheduled_time is None:
                sequence.first_scheduled_time = now
            if sequence.num_tokens_when_resumed is not None:
                sequence.num_tokens_when_resumed = sequence.num_tokens
            if num_new_tokens:  # or else it begins in the next step
                work.add(sequence, num_new_tokens, num_behind)
            budget -= num_new_tokens

    def _hold_back(self, sequence: Sequence, num_new_tokens: int) -> int:
        """How many tokens of a prompt to compute, so that those who decode do not wait for a long one."""
        num_to_compute = sequence.num_tokens - (sequence.num_cached_tokens or 0)
        if self.step_cost is None or not self.step_cost.is_long(num_to_compute):
            return num_new_tokens
        return self.step_cost.take(num_new_tokens, self.running, self.max_num_batched_tokens)

    def _is_held_back(self, sequence: Sequence) -> bool:
        """Whether this step has no more for a long prompt, which would only keep a seat from one that decodes."""
        cost = self.step_cost
        if cost is None or not (cost.is_spent and cost.is_long(sequence.num_tokens)) or sequence.swapped is not None:
            return False
        return cost.is_long(sequence.num_tokens - self._num_matched_tokens(sequence))

    def _admit(self, sequence: Sequence) -> bool:
        """Admit a sequence; where nothing runs that could make room for it, pins do."""
        while not self.kv_cache_manager.admit(sequence, self._num_reserved(sequence)):
            if self.running or not self.kv_cache_manager.pins.give_way():
                return False
        return True

    def _num_reserved(self, sequence: Sequence) -> int:
        """Blocks to leave for those who run: what they have been promised, and a reserve while one is spared."""
        if not self.running:
            return 0
        num_blocks_for = self.kv_cache_manager.num_blocks_for
        # Those that decode have their blocks already.
        num_promised = sum(num_blocks_for(item.num_tokens) - len(item.block_table) for item in self._prefilling)
        was_preempted = sequence.num_tokens_when_resumed is not None
        is_one_spared = was_preempted or (self.num_preemptions > 0 and any(map(self._is_spared, self.running)))
        return num_promised + (len(self.running) + 1 if is_one_spared else 0)

    def _waits_for_another(self, sequence: Sequence) -> bool:
        """Whether somebody who runs is about to compute a block that this one could take from the cache.

        It is decided anew in every step, so nobody waits for one that was aborted or preempted.
        """
        leader = sequence.leader
        if leader is not None and leader.block_table and not leader.is_prompt_computed:
            other: Sequence | None = leader
        else:
            other = self._computes_its_prefix(sequence)
        if other is None:
            return False
        self.num_waits_for_prefix += 1
        rank = self.waiting.rank_of(sequence)
        other.lent_rank = rank if other.lent_rank is None else min(rank, other.lent_rank)
        self._is_sorted = False
        return True

    def _computes_its_prefix(self, sequence: Sequence) -> Sequence | None:
        manager = self.kv_cache_manager
        if not self._prefilling or not manager.enable_prefix_caching or sequence.swapped is not None:
            return None
        end = (len(manager.look_up(sequence)) + 1) * manager.block_size
        if end > sequence.max_usable_prefix:
            return None
        head = sequence.token_ids[:end]
        for other in self._prefilling:
            if not other.num_computed_tokens < end <= other.num_tokens:
                continue
            if other.salt == sequence.salt and other.publishes and other.token_ids[:end] == head:
                return other
        return None

    def _num_matched_tokens(self, sequence: Sequence) -> int:
        return len(self.kv_cache_manager.look_up(sequence)) * self.kv_cache_manager.block_size
