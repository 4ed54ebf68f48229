"""Hints are carried out, within bounds, and what became of each is told."""

from __future__ import annotations

import pytest
from control_helpers import make_scheduler, make_sequence, run_step, run_until_idle

from pagedllm.api import CacheHints
from pagedllm.control.scheduler import Scheduler
from pagedllm.control.sequence import Breakpoint, Sequence


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def run_one(scheduler: Scheduler, prompt: list[int], retain: tuple[tuple[int, float], ...] = (), **hints) -> Sequence:
    sequence = make_sequence(
        prompt,
        max_tokens=1,
        hints=CacheHints(**hints),
        breakpoints=[Breakpoint(num_tokens, ttl_s) for num_tokens, ttl_s in retain],
    )
    scheduler.add([sequence])
    run_until_idle(scheduler)
    return sequence


def outcomes(sequence: Sequence) -> list[tuple[str, str, int]]:
    return [(item.hint, item.outcome, item.num_tokens) for item in sequence.outcomes]


def cached(scheduler: Scheduler, prompt: list[int], salt: str | None = None) -> int:
    return 4 * len(scheduler.kv_cache_manager.match_prefix([*prompt, -1], salt))


def flood(scheduler: Scheduler, count: int = 20) -> None:
    """Distinct prompts that evict everything that may be evicted."""
    for i in range(count):
        run_one(scheduler, [1000 + i] * 12)


def test_a_pinned_prefix_survives_a_flood_until_its_time_is_over(clock: Clock):
    scheduler = make_scheduler(num_blocks=16, clock=clock)
    prompt = list(range(20))
    pinned = run_one(scheduler, prompt, retain=((18, 60.0),))
    run_one(scheduler, [7] * 12)
    assert outcomes(pinned) == [("retain", "accepted", 16)]
    flood(scheduler)
    assert cached(scheduler, prompt) == 16
    assert cached(scheduler, [7] * 12) == 0
    clock.now = 59.0
    flood(scheduler)
    assert cached(scheduler, prompt) == 16
    clock.now = 61.0
    flood(scheduler)
    assert cached(scheduler, prompt) == 0
    assert len(scheduler.kv_cache_manager.pins) == 0


def test_a_later_request_renews_a_pin_and_never_shortens_it(clock: Clock):
    scheduler = make_scheduler(num_blocks=16, clock=clock)
    prompt = list(range(8))
    run_one(scheduler, [*prompt, 1], retain=((8, 60.0),))
    clock.now = 50.0
    run_one(scheduler, [*prompt, 2], retain=((8, 60.0),))
    run_one(scheduler, [*prompt, 3], retain=((8, 1.0),))
    clock.now = 100.0
    flood(scheduler)
    assert cached(scheduler, prompt) == 8


def test_pins_are_clipped_to_their_budget(clock: Clock):
    scheduler = make_scheduler(num_blocks=16, max_pinned_fraction=0.25, clock=clock)
    pinned = run_one(scheduler, list(range(24)), retain=((24, 60.0),))
    assert outcomes(pinned) == [("retain", "clipped", 16)]
    assert "4 blocks" in pinned.outcomes[0].reason
    assert scheduler.kv_cache_manager.usage.num_pinned == 4


def test_what_others_pinned_already_costs_nothing(clock: Clock):
    scheduler = make_scheduler(num_blocks=16, max_pinned_fraction=0.25, clock=clock)
    run_one(scheduler, list(range(17)), retain=((16, 60.0),))
    again = run_one(scheduler, [*range(16), 50, 51, 52, 53, 54], retain=((16, 60.0), (20, 60.0)))
    assert outcomes(again) == [("retain", "accepted", 16), ("retain", "clipped", 16)]


def test_a_pin_is_deferred_until_another_goes(clock: Clock):
    scheduler = make_scheduler(num_blocks=16, max_pinned_fraction=0.25, clock=clock)
    run_one(scheduler, list(range(17)), retain=((16, 10.0),))
    later = run_one(scheduler, [7] * 9, retain=((8, 60.0),))
    assert outcomes(later) == [("retain", "deferred", 0)]
    clock.now = 11.0
    run_one(scheduler, [1])  # any step
    flood(scheduler)
    assert cached(scheduler, [7] * 8) == 8
    clock.now = 61.0
    flood(scheduler)
    assert cached(scheduler, [7] * 8) == 0


def test_a_deferred_pin_of_what_is_gone_is_forgotten(clock: Clock):
    scheduler = make_scheduler(num_blocks=16, max_pinned_fraction=0.25, clock=clock)
    run_one(scheduler, list(range(17)), retain=((16, 10.0),))
    run_one(scheduler, [7] * 9, retain=((8, 60.0),))
    flood(scheduler)
    clock.now = 11.0
    run_one(scheduler, [1])
    assert scheduler.kv_cache_manager.usage.num_pinned == 0


def test_a_pin_is_rejected_where_it_cannot_be(clock: Clock):
    without_cache = make_scheduler(num_blocks=16, caching=False)
    assert outcomes(run_one(without_cache, [1] * 9, retain=((8, 60.0),))) == [("retain", "rejected", 0)]
    without_budget = make_scheduler(num_blocks=16, max_pinned_fraction=0.0)
    assert outcomes(run_one(without_budget, [1] * 9, retain=((8, 60.0),))) == [("retain", "rejected", 0)]
    full = make_scheduler(num_blocks=16, max_pinned_fraction=0.25, clock=clock)
    run_one(full, list(range(17)), retain=((16, 100.0),))
    assert outcomes(run_one(full, [7] * 9, retain=((8, 60.0),))) == [("retain", "rejected", 0)]


def test_a_pin_of_nothing_is_missing():
    scheduler = make_scheduler()
    assert outcomes(run_one(scheduler, [1] * 9, retain=((3, 60.0),))) == [("retain", "missing", 0)]
    sequence = make_sequence([1] * 9, breakpoints=[Breakpoint(8, 60.0)])
    scheduler.add([sequence])
    scheduler.abort(sequence.request_id)
    scheduler.hint_keeper.on_end(sequence)
    assert outcomes(sequence) == [("retain", "missing", 0)]
    assert scheduler.hint_keeper.counts[("retain", "missing")] == 2


def test_a_place_behind_the_prompt_is_clipped():
    scheduler = make_scheduler()
    assert outcomes(run_one(scheduler, [1] * 9, retain=((50, 60.0),))) == [("retain", "clipped", 8)]


def test_release_by_key_and_by_prefix():
    scheduler = make_scheduler(num_blocks=32)
    run_one(scheduler, list(range(9)), retain=((8, 60.0),), prefix_key="a")
    run_one(scheduler, [7] * 9, retain=((8, 60.0),), prefix_key="b")
    run_one(scheduler, [8] * 9, retain=((8, 60.0),))
    assert outcomes(run_one(scheduler, [1], release=True, prefix_key="a")) == [("release", "accepted", 8)]
    assert outcomes(run_one(scheduler, [1], release=True, prefix_key="a")) == [("release", "missing", 0)]
    assert outcomes(run_one(scheduler, [*[8] * 9, 5], release=True)) == [("release", "accepted", 8)]
    assert len(scheduler.kv_cache_manager.pins) == 1
    scheduler.check_integrity()


def test_another_tenant_cannot_release():
    scheduler = make_scheduler(num_blocks=32)
    run_one(scheduler, list(range(9)), retain=((8, 60.0),), prefix_key="a", salt="x")
    for hints in ({"prefix_key": "a", "salt": "y"}, {"prefix_key": "a"}, {"salt": "y"}):
        released = run_one(scheduler, list(range(9)), release=True, **hints)
        assert outcomes(released) == [("release", "missing", 0)]
    assert len(scheduler.kv_cache_manager.pins) == 1


def test_pins_give_way_before_a_request_would_starve(clock: Clock):
    scheduler = make_scheduler(num_blocks=8, max_pinned_fraction=1.0, clock=clock)
    run_one(scheduler, list(range(9)), retain=((8, 60.0),))
    run_one(scheduler, [7] * 17, retain=((16, 90.0),))
    large = make_sequence([3] * 16, max_tokens=8)
    scheduler.add([large])
    run_until_idle(scheduler)
    assert large.num_output_tokens == 8
    assert cached(scheduler, list(range(8))) == 0, "the pin that would go first goes first"


def test_a_reset_forgets_pins():
    scheduler = make_scheduler()
    run_one(scheduler, list(range(9)), retain=((8, 60.0),))
    scheduler.kv_cache_manager.reset_prefix_cache(scheduler.running)
    scheduler.check_integrity()
    assert scheduler.kv_cache_manager.usage.num_pinned == 0
    assert cached(scheduler, list(range(8))) == 0


def test_warm_computes_and_says_nothing():
    scheduler = make_scheduler(budget=8)
    warm = run_one(scheduler, list(range(13)), warm=True)
    assert (warm.finish_reason, warm.output_token_ids) == ("length", [])
    assert outcomes(warm) == [("warm", "accepted", 12)]
    assert run_one(scheduler, list(range(13))).num_cached_tokens == 12
    assert outcomes(run_one(make_scheduler(caching=False), [1] * 9, warm=True)) == [("warm", "rejected", 0)]


def test_priority_counts_only_under_its_policy():
    assert outcomes(run_one(make_scheduler(policy="priority"), [1], priority=3)) == [("priority", "accepted", 0)]
    rejected = run_one(make_scheduler(), [1], priority=3)
    assert outcomes(rejected) == [("priority", "rejected", 0)]
    assert "'fcfs'" in rejected.outcomes[0].reason


def test_a_pinned_prefix_is_used_while_it_is_pinned():
    """Pinned blocks that are in use are neither idle nor to be evicted; the counts must agree all the time."""
    scheduler = make_scheduler(num_blocks=16)
    run_one(scheduler, list(range(9)), retain=((8, 60.0),))
    using = make_sequence([*range(8), 50], max_tokens=6)
    scheduler.add([using])
    for _ in range(3):
        run_step(scheduler)
        usage = scheduler.kv_cache_manager.usage
        assert (usage.num_pinned, usage.num_referenced) == (2, 3)
    run_until_idle(scheduler)
    assert using.num_cached_tokens == 8
