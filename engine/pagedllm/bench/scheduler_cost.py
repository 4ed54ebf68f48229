"""What scheduler and KV cache manager take of each step, without a model."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from ..api import CacheHints, SamplingParams
from ..control.kv_cache_manager import KVCacheManager
from ..control.policies import POLICIES
from ..control.scheduler import Scheduler
from ..control.sequence import Sequence

__all__ = ["SchedulerPlan", "measure_policies"]

_BLOCK_SIZE = 16
_TOKEN_BUDGET = 512
_VOCAB_SIZE = 50_000
_BLOCKS_OF_A_PREFIX = 64
# Beside the cached blocks, so that nothing is ever evicted or preempted.
_ROOM_PER_SEAT = 50
# Until prompts, single tokens and ends are mixed as they will stay.
_NUM_WARMUP_STEPS = 150
_NUM_PRIORITIES = 5


@dataclass(frozen=True, kw_only=True)
class SchedulerPlan:
    """What is measured.

    Args:
        num_running: Seats, all taken.
        num_waiting: Requests that wait, before every step.
        nums_cached_blocks: How much the prefix cache holds, one measurement for each number.
        num_steps: That count.
        seed: Of prompts, lengths and priorities.
    """

    num_running: int = 64
    num_waiting: int = 1000
    nums_cached_blocks: tuple[int, ...] = (1000, 100_000)
    num_steps: int = 1000
    seed: int = 0


def measure_policies(plan: SchedulerPlan) -> dict[str, Any]:
    """The cost of a step in µs under each policy: median, mean, and the ratio of the medians.

    A step is schedule, update and retire. All tokens sampled are the same; prompts of 100 to 500 random tokens share
    nothing. Adding requests is not counted.
    """
    result: dict[str, Any] = {}
    least, most = min(plan.nums_cached_blocks), max(plan.nums_cached_blocks)
    for policy in POLICIES:
        for num_cached in plan.nums_cached_blocks:
            costs = _measure(plan, policy, num_cached)
            result[f"{policy}_{num_cached}_median_us"] = round(median(costs), 1)
            result[f"{policy}_{num_cached}_mean_us"] = round(mean(costs), 1)
        medians = [result[f"{policy}_{num_cached}_median_us"] for num_cached in (most, least)]
        result[f"{policy}_ratio"] = round(medians[0] / medians[1], 3)
    result["max_median_us"] = max(value for name, value in result.items() if name.endswith("_median_us"))
    result["max_ratio"] = max(result[f"{policy}_ratio"] for policy in POLICIES)
    return result


def _measure(plan: SchedulerPlan, policy: str, num_cached: int) -> list[float]:
    """Costs of the steps, in µs."""
    rng = random.Random(plan.seed)
    manager = KVCacheManager(num_blocks=num_cached + _ROOM_PER_SEAT * plan.num_running, block_size=_BLOCK_SIZE)
    _fill(manager, num_cached, rng)
    budget = max(_TOKEN_BUDGET, plan.num_running)
    scheduler = Scheduler(
        manager, max_num_seqs=plan.num_running, max_num_batched_tokens=budget, policy=POLICIES[policy]
    )
    costs = []
    for _ in range(_NUM_WARMUP_STEPS + plan.num_steps):
        while len(scheduler.waiting) + len(scheduler.running) < plan.num_waiting + plan.num_running:
            scheduler.add([_draw_sequence(rng)])
        start = time.perf_counter()
        output = scheduler.schedule()
        between = time.perf_counter()
        token_ids = [1] * len(output.sampled)
        resumed = time.perf_counter()
        scheduler.update(output, token_ids)
        scheduler.retire_finished()
        costs.append(1e6 * (time.perf_counter() - resumed + between - start))
    return costs[_NUM_WARMUP_STEPS:]


def _fill(manager: KVCacheManager, num_blocks: int, rng: random.Random) -> None:
    """Cache so many blocks, as paths of up to 64."""
    while num_blocks > 0:
        length = min(num_blocks, _BLOCKS_OF_A_PREFIX)
        sequence = _make_sequence([rng.randrange(_VOCAB_SIZE) for _ in range(length * _BLOCK_SIZE)], 1, 0)
        if not manager.admit(sequence) or not manager.allocate(sequence, sequence.num_tokens):
            raise AssertionError("the pool has room for what is to be cached")
        sequence.num_computed_tokens = sequence.num_tokens
        manager.publish(sequence)
        manager.free(sequence)
        num_blocks -= length


def _draw_sequence(rng: random.Random) -> Sequence:
    prompt = [rng.randrange(_VOCAB_SIZE) for _ in range(rng.randint(100, 500))]
    return _make_sequence(prompt, rng.randint(32, 200), rng.randrange(_NUM_PRIORITIES))


def _make_sequence(prompt: list[int], max_tokens: int, priority: int) -> Sequence:
    return Sequence(
        request_id="",
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        max_tokens=max_tokens,
        sampling=SamplingParams(ignore_eos=True),
        seed=0,
        eos_token_ids=frozenset(),
        hints=CacheHints(priority=priority),
    )
