"""Sequences and steps for tests of policy, without a model."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable

from pagedllm.api import CacheHints, SamplingParams
from pagedllm.control.kv_cache_manager import KVCacheManager
from pagedllm.control.policies import POLICIES
from pagedllm.control.scheduler import Scheduler, SchedulerOutput
from pagedllm.control.sequence import Breakpoint, Sequence
from pagedllm.control.swap_choice import SwapChoice

_ids = itertools.count()
EOS = 9


def make_sequence(
    prompt: list[int],
    max_tokens: int = 8,
    salt: str | None = None,
    *,
    hints: CacheHints | None = None,
    breakpoints: Iterable[Breakpoint] = (),
    **sampling,
) -> Sequence:
    return Sequence(
        request_id=f"r{next(_ids)}",
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        max_tokens=max_tokens,
        sampling=SamplingParams(**sampling),
        seed=0,
        eos_token_ids=frozenset({EOS}),
        hints=hints or CacheHints(salt=salt),
        breakpoints=tuple(breakpoints),
    )


def make_choices(
    prompt: list[int], n: int, max_tokens: int = 8, salt: str | None = None, *, hints: CacheHints | None = None
) -> list[Sequence]:
    """The sequences of one request for ``n`` choices, the leader first."""
    leader = make_sequence(prompt, max_tokens, salt, hints=hints)
    choices = [leader]
    for index in range(1, n):
        follower = make_sequence(prompt, max_tokens, salt, hints=hints)
        follower.request_id, follower.index, follower.leader = leader.request_id, index, leader
        choices.append(follower)
    return choices


def make_scheduler(
    num_blocks: int = 16,
    block_size: int = 4,
    *,
    max_num_seqs: int = 8,
    budget: int = 64,
    caching: bool = True,
    num_host_blocks: int = 0,
    max_pinned_fraction: float = 0.5,
    policy: str = "fcfs",
    mode: str = "auto",
    max_queued: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Scheduler:
    manager = KVCacheManager(
        num_blocks=num_blocks,
        block_size=block_size,
        enable_prefix_caching=caching,
        num_host_blocks=num_host_blocks,
        max_pinned_fraction=max_pinned_fraction,
    )
    return Scheduler(
        manager,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        policy=POLICIES[policy],
        max_num_queued_requests=max_queued,
        clock=clock,
        swap_choice=SwapChoice(mode=mode, bytes_per_block=1, copy_bytes_per_s=1e3 if num_host_blocks else None),
    )


def run_step(scheduler: Scheduler, token_id: int = 1) -> SchedulerOutput:
    """One step in which the model says ``token_id`` for every sampled sequence."""
    output = scheduler.schedule()
    scheduler.update(output, [token_id] * len(output.sampled))
    scheduler.retire_finished()
    scheduler.check_integrity()
    return output


def run_until_idle(scheduler: Scheduler, max_steps: int = 1000) -> int:
    """Steps until nothing is left; fails when that takes too many."""
    for step in range(max_steps):
        if not scheduler.has_work:
            return step
        run_step(scheduler)
    raise AssertionError(f"still {len(scheduler.running)} running after {max_steps} steps")
