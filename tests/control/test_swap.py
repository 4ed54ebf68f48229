"""The host tier: what leaves the device comes back, in the right order, and is counted."""

from __future__ import annotations

import pytest
from control_helpers import make_choices, make_scheduler, make_sequence, run_step, run_until_idle
from fake_kv import FakeModel, expected_tokens

from pagedllm.control.scheduler import Scheduler
from pagedllm.control.swap_choice import SwapChoice


def press(scheduler: Scheduler, num_requests: int = 4) -> list:
    """Long answers that cannot be in the pool together."""
    model = FakeModel(scheduler)
    sequences = [make_sequence([i] * 9, max_tokens=24) for i in range(num_requests)]
    for sequence in sequences:
        scheduler.add([sequence])
    model.run_until_idle()
    for i, sequence in enumerate(sequences):
        assert sequence.output_token_ids == expected_tokens([i] * 9, 24)
    return sequences


@pytest.mark.parametrize("caching", [True, False])
def test_a_swapped_sequence_computes_nothing_again(caching: bool):
    scheduler = make_scheduler(num_blocks=18, num_host_blocks=64, mode="swap", caching=caching)
    computed: dict[object, int] = {}
    model = FakeModel(scheduler)
    sequences = [make_sequence([i] * 9, max_tokens=24) for i in range(4)]
    for sequence in sequences:
        scheduler.add([sequence])
    while scheduler.has_work:
        output = model.step()
        for sequence, num_new_tokens in zip(output.sequences, output.nums_new_tokens, strict=True):
            computed[sequence] = computed.get(sequence, 0) + num_new_tokens
    assert scheduler.preemptions["swap"] > 0
    assert scheduler.preemptions["recompute"] == 0
    assert set(computed.values()) == {9 + 23}
    assert scheduler.kv_cache_manager.counters.prefix_hits == 0, "its own earlier work is no hit"


def test_recompute_leaves_nothing_on_the_host():
    scheduler = make_scheduler(num_blocks=18, num_host_blocks=64, mode="recompute")
    press(scheduler)
    assert scheduler.preemptions["recompute"] > 0
    assert scheduler.preemptions["swap"] == 0
    # What finished requests leave behind may go to the host; what was preempted may not.
    assert scheduler.kv_cache_manager.host.num_copied_in == 0


def test_a_full_host_falls_back_to_recompute():
    scheduler = make_scheduler(num_blocks=18, num_host_blocks=1, mode="swap", caching=False)
    press(scheduler)
    assert scheduler.preemptions["recompute"] > 0


def test_an_evicted_prefix_comes_back_from_the_host():
    scheduler = make_scheduler(num_blocks=8, num_host_blocks=32)
    model = FakeModel(scheduler)
    prompts = [[i] * 13 for i in range(4)]
    for round_number in range(2):
        for i, prompt in enumerate(prompts):
            sequence = make_sequence(prompt, max_tokens=4)
            scheduler.add([sequence])
            model.run_until_idle()
            assert sequence.output_token_ids == expected_tokens(prompt, 4)
            assert sequence.num_cached_tokens == 12 * round_number, i
    counters = scheduler.kv_cache_manager.counters
    assert counters.prefix_hits == 48
    assert counters.prefix_hits_on_host > 0
    assert counters.num_evictions > 0


def test_a_reset_covers_the_host():
    scheduler = make_scheduler(num_blocks=10, num_host_blocks=32)
    press(scheduler, num_requests=3)
    assert scheduler.kv_cache_manager.usage.num_host_cached > 0
    scheduler.kv_cache_manager.reset_prefix_cache(scheduler.running)
    scheduler.check_integrity()
    assert scheduler.kv_cache_manager.usage.num_host_free == 32


def test_a_reset_while_sequences_are_swapped_out():
    """What precedes their own blocks is forgotten, so they begin again."""
    scheduler = make_scheduler(num_blocks=18, num_host_blocks=64, mode="swap")
    model = FakeModel(scheduler)
    sequences = [make_sequence([i] * 9, max_tokens=24) for i in range(4)]
    for sequence in sequences:
        scheduler.add([sequence])
    while not any(sequence.swapped for sequence in scheduler.waiting):
        model.step()
    scheduler.kv_cache_manager.reset_prefix_cache(scheduler.running)
    model.run_until_idle()
    for i, sequence in enumerate(sequences):
        assert sequence.output_token_ids == expected_tokens([i] * 9, 24)


def test_aborting_a_swapped_sequence_frees_its_host_blocks():
    scheduler = make_scheduler(num_blocks=18, num_host_blocks=64, mode="swap", caching=False)
    sequences = [make_sequence([i] * 9, max_tokens=24) for i in range(4)]
    for sequence in sequences:
        scheduler.add([sequence])
    while not any(sequence.swapped for sequence in scheduler.waiting):
        run_step(scheduler)
    for sequence in sequences:
        scheduler.abort(sequence.request_id)
    scheduler.check_integrity()
    assert scheduler.kv_cache_manager.usage.num_host_free == 64
    assert not scheduler.has_work


def test_choices_share_the_prompt_and_copy_its_end_once():
    scheduler = make_scheduler(num_blocks=32)

    choices = make_choices(list(range(10)), n=4, max_tokens=3)
    scheduler.add(choices)
    run_step(scheduler)
    output = run_step(scheduler)
    assert [copy.kind for copy in output.copies] == ["device"] * 3
    assert scheduler.kv_cache_manager.usage.num_referenced == 2 + 4
    run_until_idle(scheduler)


def test_the_choice_follows_the_cost():
    """Two copies of the blocks against computing the tokens again, at measured rates."""
    choice = SwapChoice(bytes_per_block=1000, copy_bytes_per_s=1e6)
    assert choice.prefers_swap(10, 160), "nothing is known of prefill yet"
    choice.observe_step(num_prefill_tokens=100, num_tokens=100, duration_s=1.0)
    assert choice.prefers_swap(10, 160)  # 0.02 s against 1.6 s
    fast = SwapChoice(bytes_per_block=1000, copy_bytes_per_s=1e6, prefill_tokens_per_s=1e5)
    assert not fast.prefers_swap(10, 160)  # 0.02 s against 0.0016 s
    fast.mode = "swap"
    assert fast.prefers_swap(10, 160)
    assert not SwapChoice(mode="swap").prefers_swap(10, 160), "there is no host tier"


def test_decode_steps_teach_nothing_about_prefill():
    choice = SwapChoice(copy_bytes_per_s=1.0)
    choice.observe_step(num_prefill_tokens=0, num_tokens=64, duration_s=1.0)
    choice.observe_step(num_prefill_tokens=8, num_tokens=8, duration_s=1.0)
    assert choice.prefill_tokens_per_s is None
