"""Long prompts are held back while others decode."""

from __future__ import annotations

from control_helpers import make_scheduler, make_sequence, run_step, run_until_idle

from pagedllm.control.step_cost import StepCost


def test_a_step_with_a_prompt_takes_at_most_so_many_times_as_long():
    cost = StepCost(max_stretch=3.0, long_prompt=100)
    assert cost.max_prompt_tokens(1) == 16, "nothing is known yet"
    for _ in range(20):
        cost.observe(num_decode_tokens=1, num_prompt_tokens=0, duration_s=0.010)
        cost.observe(num_decode_tokens=32, num_prompt_tokens=0, duration_s=0.040)
        cost.observe(num_decode_tokens=1, num_prompt_tokens=100, duration_s=0.010 + 100 * 0.0005)
    assert cost.max_prompt_tokens(1) == 40  # 2 x 0.010 / 0.0005
    assert cost.max_prompt_tokens(33) == 160
    assert cost.max_prompt_tokens(4) == 40, "the nearest size that was seen"


def test_one_slow_step_changes_little():
    """A step that shared the machine with something else is not what a step takes."""
    cost = StepCost(max_stretch=3.0, long_prompt=100)
    cost.observe(num_decode_tokens=1, num_prompt_tokens=0, duration_s=0.010)
    cost.observe(num_decode_tokens=1, num_prompt_tokens=100, duration_s=0.010 + 100 * 0.0005)
    cost.observe(num_decode_tokens=1, num_prompt_tokens=0, duration_s=10.0)
    assert cost.max_prompt_tokens(1) == 46


def test_a_prompt_gets_on_however_dear_it_is():
    cost = StepCost(max_stretch=1.5, long_prompt=100)
    cost.observe(num_decode_tokens=1, num_prompt_tokens=0, duration_s=0.001)
    cost.observe(num_decode_tokens=1, num_prompt_tokens=1, duration_s=10.0)
    assert cost.max_prompt_tokens(1) == 16


def test_only_long_prompts_are_held_back_and_only_beside_decodes():
    scheduler = make_scheduler(num_blocks=200, budget=128)
    scheduler.step_cost = StepCost(max_stretch=2.0, long_prompt=40)
    first = make_sequence([1] * 100, max_tokens=30)
    scheduler.add([first])
    assert run_step(scheduler).num_tokens == 100, "nobody decodes"
    long, other, short = make_sequence([2] * 90), make_sequence([3] * 90), make_sequence([4] * 30)
    for sequence in (long, other, short):
        scheduler.add([sequence])
    chunks = []
    while long.num_output_tokens == 0:
        output = run_step(scheduler)
        step = dict(zip(output.sequences, output.nums_new_tokens, strict=True))
        chunks.append([step.get(sequence, 0) for sequence in (first, long, other, short)])
    assert chunks[0] == [1, 16, 0, 30]
    assert all(chunk[0] == 1 for chunk in chunks)
    assert [chunk[1] + chunk[2] for chunk in chunks] == [16] * len(chunks)
    run_until_idle(scheduler)
    assert all(sequence.num_output_tokens for sequence in (first, long, other, short))


def test_what_is_cached_does_not_make_a_prompt_long():
    scheduler = make_scheduler(num_blocks=200, budget=128)
    scheduler.step_cost = StepCost(max_stretch=2.0, long_prompt=40)
    scheduler.add([make_sequence([2] * 90, max_tokens=1)])
    run_until_idle(scheduler)
    first, again = make_sequence([1] * 9, max_tokens=30), make_sequence([2] * 90 + [3] * 20, max_tokens=1)
    scheduler.add([first])
    run_step(scheduler)
    scheduler.add([again])
    assert list(run_step(scheduler).nums_new_tokens) == [1, 22]


def test_who_is_held_back_takes_no_seat():
    """Seats full of prompts that wait for each other leave few that decode, and those leave little time for prompts."""
    scheduler = make_scheduler(num_blocks=400, budget=128, max_num_seqs=4)
    scheduler.step_cost = StepCost(max_stretch=2.0, long_prompt=40)
    first = make_sequence([1] * 9, max_tokens=40)
    scheduler.add([first])
    run_step(scheduler)
    long = [make_sequence([10 + i] * 90, max_tokens=2) for i in range(3)]
    short = [make_sequence([20 + i] * 9, max_tokens=40) for i in range(2)]
    for sequence in (*long, *short):
        scheduler.add([sequence])
    run_step(scheduler)
    assert scheduler.running == [first, long[0], *short]
    run_until_idle(scheduler)
    assert all(sequence.num_output_tokens == 2 for sequence in long)


def test_what_is_cached_lets_a_prompt_through():
    """A prompt that is long as a text, but not to compute, is not held back."""
    scheduler = make_scheduler(num_blocks=400, budget=128)
    scheduler.step_cost = StepCost(max_stretch=2.0, long_prompt=40)
    scheduler.add([make_sequence([2] * 90, max_tokens=1)])
    run_until_idle(scheduler)
    first = make_sequence([1] * 9, max_tokens=40)
    scheduler.add([first])
    run_step(scheduler)
    long, again = make_sequence([3] * 90), make_sequence([2] * 90 + [4] * 20)
    scheduler.add([long])
    scheduler.add([again])
    output = run_step(scheduler)
    assert output.sequences == (first, long, again)


def test_short_ones_do_not_keep_long_prompts_from_their_turn():
    """Whoever is passed over comes first as soon as there is a seat and time for a long prompt."""
    scheduler = make_scheduler(num_blocks=400, budget=128, max_num_seqs=4)
    scheduler.step_cost = StepCost(max_stretch=2.0, long_prompt=40)
    long = [make_sequence([10 + i] * 90, max_tokens=2) for i in range(3)]
    for _ in range(8):
        scheduler.add([make_sequence([1] * 9, max_tokens=4)])
    for sequence in long:
        scheduler.add([sequence])
    for _ in range(80):
        scheduler.add([make_sequence([1] * 9, max_tokens=4)])
        run_step(scheduler)
    assert all(sequence.is_finished for sequence in long)
