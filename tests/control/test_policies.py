"""Who runs first, who gives way, who may wait how long."""

from __future__ import annotations

import random

import pytest
from control_helpers import make_choices, make_scheduler, make_sequence, run_step, run_until_idle
from fake_kv import FakeModel
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedllm.api import CacheHints
from pagedllm.control.policies import POLICIES
from pagedllm.control.scheduler import Scheduler
from pagedllm.control.sequence import Sequence
from pagedllm.control.waiting_queue import MAX_OVERTAKING
from pagedllm.errors import QueueFullError


def with_priority(prompt: list[int], priority: int, max_tokens: int = 8) -> Sequence:
    return make_sequence(prompt, max_tokens, hints=CacheHints(priority=priority))


def order_of_start(scheduler: Scheduler, sequences: list[Sequence]) -> list[int]:
    """Indices of the sequences in the order in which they are first computed."""
    started: list[int] = []
    while scheduler.has_work:
        for sequence in run_step(scheduler).sequences:
            index = sequences.index(sequence)
            if index not in started:
                started.append(index)
    return started


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("fcfs", [0, 1, 2, 3]), ("priority", [3, 1, 0, 2]), ("shortest", [1, 3, 2, 0]), ("cache_aware", [2, 0, 1, 3])],
)
def test_each_policy_has_its_order(policy: str, expected: list[int]):
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=1, policy=policy)
    scheduler.add([make_sequence([9] * 16, max_tokens=1)])
    run_until_idle(scheduler)
    sequences = [
        with_priority([9] * 8 + [1] * 20, 5, max_tokens=1),  # 8 cached, 20 to compute
        with_priority([2] * 3, 0, max_tokens=1),  # nothing cached, 3 to compute
        with_priority([9] * 16 + [3] * 12, 5, max_tokens=1),  # 16 cached, 12 to compute
        with_priority([4] * 5, -1, max_tokens=1),  # nothing cached, 5 to compute
    ]
    for sequence in sequences:
        scheduler.add([sequence])
    assert order_of_start(scheduler, sequences) == expected


def test_cache_aware_sees_what_was_cached_after_the_request_came():
    """A match remembered from the arrival would miss what others have published since."""
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=1, policy="cache_aware")
    first, other, follower = (
        make_sequence([9] * 8 + [1], max_tokens=2),
        make_sequence([2] * 9, max_tokens=1),
        make_sequence([9] * 8 + [3], max_tokens=1),
    )
    for sequence in (first, other, follower):
        scheduler.add([sequence])
    assert order_of_start(scheduler, [first, other, follower]) == [0, 2, 1]


def test_a_match_is_forgotten_with_its_blocks():
    """The queue remembers matches; eviction between two looks must not leave it with nodes that are others' now."""
    scheduler = make_scheduler(num_blocks=8, max_num_seqs=1, policy="cache_aware")
    scheduler.add([make_sequence([9] * 9, max_tokens=1)])
    run_until_idle(scheduler)
    running, waiting = make_sequence([1] * 4, max_tokens=27), make_sequence([9] * 9, max_tokens=1)
    scheduler.add([running])
    run_step(scheduler)
    scheduler.add([waiting])
    assert scheduler.waiting.rank_of(waiting)[0] == -8
    while not running.is_finished:
        run_step(scheduler)
    assert scheduler.waiting.rank_of(waiting)[0] == 0
    run_until_idle(scheduler)
    assert waiting.num_cached_tokens == 0


def test_a_better_priority_goes_before_a_preempted_sequence_and_is_preempted_last():
    scheduler = make_scheduler(num_blocks=6, policy="priority", caching=False)
    low, high = with_priority([1] * 8, 1, max_tokens=12), with_priority([2] * 8, 0, max_tokens=12)
    scheduler.add([low])
    run_step(scheduler)
    scheduler.add([high])
    while not high.is_finished:
        run_step(scheduler)
        assert high in scheduler.running or high.is_finished
    assert scheduler.num_preemptions > 0
    run_until_idle(scheduler)


@pytest.mark.parametrize("policy", ["priority", "shortest", "cache_aware"])
def test_nobody_is_overtaken_without_end(policy: str):
    """A flood of better-placed requests must not starve one that came before them."""
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=2, policy=policy)
    scheduler.add([make_sequence([9] * 8, max_tokens=1)])
    run_until_idle(scheduler)
    poor = with_priority([5] * 30, 100, max_tokens=1)
    num_overtaking = 0
    scheduler.add([poor])
    while poor.first_scheduled_time is None:
        while len(scheduler.waiting) < 8:
            scheduler.add([with_priority([9] * 8 + [1], 0, max_tokens=1)])
        num_overtaking += sum(sequence is not poor for sequence in run_step(scheduler).sequences)
        assert num_overtaking <= MAX_OVERTAKING + scheduler.max_num_seqs
    assert num_overtaking >= MAX_OVERTAKING / 2, "the flood was not better placed"


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), policy=st.sampled_from(sorted(POLICIES)))
def test_a_readmitted_sequence_gets_a_block_of_tokens_before_it_is_preempted_again(seed: int, policy: str):
    """Otherwise two long requests can take each other's blocks for ever, and compute their prompts over and over."""
    dice = random.Random(seed)
    scheduler = make_scheduler(num_blocks=16, block_size=4, max_num_seqs=6, budget=64, policy=policy)
    model = FakeModel(scheduler)
    for _ in range(12):
        prompt = [dice.randrange(50) for _ in range(dice.randint(1, 20))]
        scheduler.add([with_priority(prompt, dice.randint(0, 2), max_tokens=dice.randint(8, 30))])
    resumed: set[Sequence] = set()
    length_when_admitted: dict[Sequence, int] = {}
    for _ in range(3000):
        if not scheduler.has_work:
            break
        before = {sequence: sequence.num_tokens for sequence in scheduler.running}
        model.step()
        for sequence in scheduler.running:
            if sequence not in before:
                length_when_admitted[sequence] = sequence.num_tokens - 1
        for sequence in set(before) - set(scheduler.running):
            if sequence.num_tokens_when_resumed != sequence.num_tokens and not sequence.is_finished:
                raise AssertionError("a sequence left without a reason")
            if sequence in resumed and not sequence.is_finished:
                assert sequence.num_tokens - length_when_admitted[sequence] >= 4, "preempted again at once"
            if not sequence.is_finished:
                resumed.add(sequence)
    assert not scheduler.has_work
    assert resumed, "the load does not press the pool"


def test_requests_wait_for_a_prefix_that_is_being_computed():
    """Computing the same 12 tokens three times in one batch would be the waste that a prefix cache is against."""
    scheduler = make_scheduler(num_blocks=64, budget=8)
    shared = list(range(12))
    sequences = [make_sequence([*shared, 50 + i], max_tokens=2) for i in range(3)]
    other = make_sequence([80, 81], max_tokens=2)
    for sequence in (*sequences, other):
        scheduler.add([sequence])
    num_computed = 0
    while scheduler.has_work:
        output = run_step(scheduler)
        step = dict(zip(output.sequences, output.nums_new_tokens, strict=True))
        num_computed += sum(step.get(sequence, 0) for sequence in sequences)
        assert other.first_scheduled_time is None or output.sequences
    assert [sequence.num_cached_tokens for sequence in sequences] == [0, 12, 12]
    assert num_computed == 13 + 1 + 1 + 3  # prompts, and the second token of each
    assert other.first_scheduled_time < sequences[1].first_scheduled_time
    assert scheduler.num_waits_for_prefix > 0


def test_a_follower_is_free_when_the_one_it_waits_for_is_aborted():
    scheduler = make_scheduler(num_blocks=64, budget=8)
    first, second = make_sequence(list(range(20))), make_sequence(list(range(20)))
    scheduler.add([first])
    scheduler.add([second])
    run_step(scheduler)
    assert not second.block_table
    scheduler.abort(first.request_id)
    assert list(run_step(scheduler).sequences) == [second]
    run_until_idle(scheduler)


def test_a_follower_lends_its_priority():
    """An urgent request that waits for a slow one's prefix must not wait for the slow one to be preempted."""
    scheduler = make_scheduler(num_blocks=9, budget=4, max_num_seqs=4, policy="priority")
    slow, middle = with_priority(list(range(20)), 9, max_tokens=1), with_priority([70] * 3, 5, max_tokens=30)
    scheduler.add([middle])
    run_step(scheduler)
    scheduler.add([slow])
    run_step(scheduler)
    urgent = with_priority(list(range(20)), 0, max_tokens=1)
    scheduler.add([urgent])
    run_step(scheduler)
    assert scheduler.policy.rank_of_running(slow) < scheduler.policy.rank_of_running(middle)
    while not slow.is_finished:
        run_step(scheduler)
        assert slow in scheduler.running or slow.is_finished
    run_until_idle(scheduler)


def test_the_queue_has_a_bound():
    scheduler = make_scheduler(max_num_seqs=1, max_queued=2)
    scheduler.add([make_sequence([1] * 4)])
    run_step(scheduler)
    scheduler.add(make_choices([2] * 4, n=3))  # one request, three sequences
    scheduler.add([make_sequence([3] * 4)])
    with pytest.raises(QueueFullError, match="max_num_queued_reqs=2"):
        scheduler.add([make_sequence([4] * 4)])
    assert scheduler.num_refused == 1
    run_until_idle(scheduler)
    scheduler.add([make_sequence([4] * 4)])
    run_until_idle(scheduler)


def test_those_who_waited_too_long_are_known():
    now = [100.0]
    scheduler = make_scheduler(max_num_seqs=1, clock=lambda: now[0])
    running, *waiting = (make_sequence([i] * 4) for i in range(3))
    choices = make_choices([7] * 4, n=2)
    for sequence, arrival in zip((running, *waiting), (90.0, 95.0, 105.0), strict=True):
        sequence.arrival_time = arrival
        scheduler.add([sequence])
    for sequence in choices:
        sequence.arrival_time = 106.0
    scheduler.add(choices)
    run_step(scheduler)
    assert scheduler.waiting.timed_out(100.0) == [waiting[0]]
    assert scheduler.waiting.timed_out(200.0) == [*waiting, *choices]
    run_until_idle(scheduler)
