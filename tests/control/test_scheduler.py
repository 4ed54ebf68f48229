"""Continuous batching: budget, chunks, order, preemption, refusal."""

from __future__ import annotations

import pytest
from control_helpers import EOS, make_choices, make_scheduler, make_sequence, run_step, run_until_idle
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagedllm.errors import ContextLengthError


def test_prefill_and_decode_share_a_step():
    scheduler = make_scheduler()
    first, second = make_sequence([1, 2, 3]), make_sequence([4, 5, 6, 7])
    scheduler.add([first])
    run_step(scheduler)
    scheduler.add([second])
    output = run_step(scheduler)
    assert (output.sequences, output.nums_new_tokens) == ((first, second), (1, 4))


def test_a_long_prompt_is_computed_in_chunks_beside_decodes():
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=8, budget=8)
    short, long = make_sequence([1, 2], max_tokens=20), make_sequence(list(range(20)))
    scheduler.add([short])
    run_step(scheduler)
    scheduler.add([long])
    chunks = []
    while long.num_output_tokens == 0:
        output = run_step(scheduler)
        assert output.sequences[0] is short, "a decode waits for a prefill"
        chunks.append(output.nums_new_tokens[1])
    assert chunks == [7, 7, 6]
    assert short.num_output_tokens == 4


def test_a_seat_is_refilled_in_the_step_after_it_is_left():
    """Static batching would wait for the whole batch."""
    scheduler = make_scheduler(max_num_seqs=2)
    short, long, waiting = make_sequence([1], max_tokens=1), make_sequence([2], max_tokens=9), make_sequence([3])
    for sequence in (short, long, waiting):
        scheduler.add([sequence])
    run_step(scheduler)
    assert short.is_finished
    assert waiting in list(run_step(scheduler).sequences)


def test_the_last_to_arrive_is_preempted_and_resumes_with_its_tokens():
    scheduler = make_scheduler(num_blocks=4, caching=False)
    first, second = make_sequence([1] * 7, max_tokens=9), make_sequence([2] * 7, max_tokens=9)
    scheduler.add([first])
    scheduler.add([second])
    run_step(scheduler)
    run_step(scheduler)
    output = run_step(scheduler)
    assert output.num_preempted == 1
    assert list(scheduler.waiting) == [second]
    assert second.block_table == []
    assert second.num_output_tokens == 2, "sampled tokens are kept"
    run_until_idle(scheduler)
    assert first.num_output_tokens == second.num_output_tokens == 9


def test_the_head_of_the_queue_is_never_overtaken():
    """First come, first served: small requests behind a large one must not starve it."""
    scheduler = make_scheduler(num_blocks=8)
    running, large, small = make_sequence([1] * 16), make_sequence([2] * 24), make_sequence([3])
    scheduler.add([running])
    run_step(scheduler)
    scheduler.add([large])
    scheduler.add([small])
    output = run_step(scheduler)
    assert list(output.sequences) == [running]
    run_until_idle(scheduler)
    assert large.first_scheduled_time <= small.first_scheduled_time


def test_what_can_never_fit_is_refused_at_once_with_numbers():
    """Waiting for room that cannot come would block everything behind it for ever."""
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    with pytest.raises(ContextLengthError, match=r"14 prompt tokens.*max_tokens=8.*6.*4") as caught:
        scheduler.add([make_sequence([1] * 14, max_tokens=8)])
    assert caught.value.code == "context_length_exceeded"
    scheduler.add([make_sequence([1] * 8, max_tokens=8)])
    run_until_idle(scheduler)


def test_eos_and_stop_tokens_end_a_sequence_unless_ignored():
    scheduler = make_scheduler()
    plain, deaf, own = (
        make_sequence([1]),
        make_sequence([1], max_tokens=3, ignore_eos=True),
        make_sequence([1], stop_token_ids=[5]),
    )
    for sequence in (plain, deaf, own):
        scheduler.add([sequence])
    run_step(scheduler, token_id=EOS)
    assert (plain.finish_reason, plain.stop_reason) == ("stop", EOS)
    assert not deaf.is_finished
    run_until_idle(scheduler)
    assert deaf.finish_reason == "length"


def test_abort_frees_running_and_waiting():
    scheduler = make_scheduler(max_num_seqs=1)
    running, waiting = make_sequence([1] * 9), make_sequence([2] * 9)
    scheduler.add([running])
    scheduler.add([waiting])
    run_step(scheduler)
    assert scheduler.abort(waiting.request_id) == [waiting]
    assert scheduler.abort(running.request_id) == [running]
    assert scheduler.abort("unknown") == []
    assert not scheduler.has_work
    scheduler.check_integrity()
    assert scheduler.kv_cache_manager.usage.num_referenced == 0


@pytest.mark.parametrize("caching", [True, False])
def test_choices_wait_for_the_prompt_and_share_its_full_blocks(caching: bool):
    scheduler = make_scheduler(num_blocks=32, budget=8, caching=caching)
    leader, *followers = make_choices(list(range(10)), n=3)
    other = make_sequence([90, 91])
    scheduler.add([leader, *followers])
    scheduler.add([other])
    assert list(run_step(scheduler).sequences) == [leader]
    # The leader's last two tokens; its followers still wait, and nobody waits behind them.
    assert list(run_step(scheduler).sequences) == [leader, other]
    output = run_step(scheduler)
    assert list(output.nums_new_tokens) == [1, 1, 1, 1], "a choice computes one token of its own"
    for follower in followers:
        assert follower.block_table[:2] == leader.block_table[:2]
        assert follower.block_table[2] != leader.block_table[2]
    assert scheduler.kv_cache_manager.usage.num_referenced == 2 + 3 + 1
    run_until_idle(scheduler)


@pytest.mark.parametrize("ending", ["abort", "finish"])
def test_followers_of_a_gone_leader_go_on(ending: str):
    scheduler = make_scheduler(max_num_seqs=1, budget=8)
    leader, follower = make_choices(list(range(10)), n=2, max_tokens=1 if ending == "finish" else 5)
    scheduler.add([leader, follower])
    run_step(scheduler)
    if ending == "abort":
        scheduler.abort(leader.request_id)
        assert follower.is_finished
    else:
        run_until_idle(scheduler)
        assert follower.finish_reason == "length"
    scheduler.check_integrity()


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, aborts, resets and finishes; blocks are conserved after every step and everyone finishes."""

    @initialize(
        num_blocks=st.integers(6, 20),
        seats=st.integers(1, 5),
        extra_budget=st.integers(0, 12),
        caching=st.booleans(),
    )
    def start(self, num_blocks: int, seats: int, extra_budget: int, caching: bool):
        self.scheduler = make_scheduler(
            num_blocks, block_size=3, max_num_seqs=seats, budget=seats + extra_budget, caching=caching
        )
        self.sequences = []

    @rule(
        pattern=st.integers(0, 2),
        length=st.integers(1, 14),
        max_tokens=st.integers(1, 14),
        salt=st.sampled_from([None, "a"]),
        n=st.sampled_from([1, 1, 1, 2, 4]),
    )
    def arrive(self, pattern: int, length: int, max_tokens: int, salt: str | None, n: int):
        # Few patterns, so that prefixes are shared, diverge and meet again.
        prompt = [0 if i < 6 else pattern for i in range(length)]
        choices = make_choices(prompt, n, max_tokens, salt)
        try:
            self.scheduler.add(choices)
        except ContextLengthError:
            assert -(-(length + max_tokens) // 3) > self.scheduler.kv_cache_manager.pool.num_blocks
        else:
            self.sequences.extend(choices)

    @rule(token=st.sampled_from([1, 2, EOS]))
    def step(self, token: int):
        if not self.scheduler.has_work:
            return
        best = sorted(self.scheduler.running, key=self.scheduler.policy.rank_of_running)[:1]
        progress = [(item.num_computed_tokens, item.num_tokens) for item in best]
        output = run_step(self.scheduler, token)
        assert output.sequences
        assert output.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len(output.sequences) <= self.scheduler.max_num_seqs
        assert min(output.nums_new_tokens) > 0
        assert all(not item.block_table for item in self.sequences if item.is_finished)
        assert [(item.num_computed_tokens, item.num_tokens) for item in best] != progress or not best

    @rule(choice=st.integers(0, 100))
    def abort(self, choice: int):
        if self.sequences:
            self.scheduler.abort(self.sequences[choice % len(self.sequences)].request_id)

    @rule()
    def reset(self):
        self.scheduler.kv_cache_manager.reset_prefix_cache(self.scheduler.running)

    @invariant()
    def blocks_are_conserved(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    def teardown(self):
        if hasattr(self, "scheduler"):
            run_until_idle(self.scheduler)
            assert all(item.is_finished for item in self.sequences)
            assert self.scheduler.kv_cache_manager.usage.num_referenced == 0


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
