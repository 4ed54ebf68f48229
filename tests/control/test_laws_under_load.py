"""Swap, forks, pins, hints, aborts, resets and eviction together: blocks are conserved and every token is right."""

from __future__ import annotations

import random

import pytest
from control_helpers import make_choices, make_scheduler
from fake_kv import FakeModel, expected_tokens
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagedllm.api import CacheHints
from pagedllm.control.policies import POLICIES
from pagedllm.control.sequence import Breakpoint, Sequence
from pagedllm.control.step_cost import StepCost
from pagedllm.errors import ContextLengthError

BLOCK_SIZE = 3


class DearPrompts(StepCost):
    """Leaves two tokens of long prompts beside those that decode."""

    def max_prompt_tokens(self, num_decoding: int) -> int:
        return 2


class Load:
    """A scheduler, the fake model, and what every request must say."""

    def __init__(self, *, long_prompt: int | None = None, **options) -> None:
        self.now = 0.0
        self.scheduler = make_scheduler(block_size=BLOCK_SIZE, clock=lambda: self.now, **options)
        if long_prompt is not None:
            self.scheduler.step_cost = DearPrompts(max_stretch=2.0, long_prompt=long_prompt)
        self.model = FakeModel(self.scheduler)
        self.sequences: list[Sequence] = []

    def arrive(self, prompt: list[int], max_tokens: int, n: int, hints: CacheHints, retain: list[int]) -> None:
        choices = make_choices(prompt, 1 if hints.warm else n, max_tokens, hints=hints)
        choices[0].breakpoints = tuple(Breakpoint(num_tokens, 20.0) for num_tokens in retain)
        try:
            self.scheduler.add(choices)
        except ContextLengthError:
            pool = self.scheduler.kv_cache_manager.pool
            assert -(-(len(prompt) + max_tokens) // BLOCK_SIZE) > pool.num_blocks
        else:
            self.sequences.extend(choices)

    def step(self) -> None:
        self.now += 1.0
        if self.scheduler.has_work:
            output = self.model.step()
            assert output.num_tokens <= self.scheduler.max_num_batched_tokens
            assert len(output.sequences) <= self.scheduler.max_num_seqs
        self.check_texts()

    def check_texts(self) -> None:
        for sequence in self.sequences:
            prompt = sequence.token_ids[: sequence.num_prompt_tokens]
            said = sequence.output_token_ids
            assert said == expected_tokens(prompt, len(said)), "a token came from the wrong KV"
            if sequence.finish_reason == "length":
                assert len(said) == (0 if sequence.hints.warm else sequence.max_tokens)
        self.sequences = [sequence for sequence in self.sequences if not sequence.is_finished]

    def finish(self) -> None:
        """Everybody finishes, and nobody holds anything then."""
        self.model.run_until_idle()
        assert all(sequence.is_finished for sequence in self.sequences)
        self.check_texts()
        usage = self.scheduler.kv_cache_manager.usage
        assert usage.num_referenced == 0
        assert usage.num_host_free + usage.num_host_cached == usage.num_host_blocks


POOLS = {
    "num_blocks": st.integers(6, 20),
    "num_host_blocks": st.sampled_from([0, 2, 6, 20]),
    "seats": st.integers(1, 5),
    "extra_budget": st.integers(0, 12),
    "caching": st.booleans(),
    "policy": st.sampled_from(sorted(POLICIES)),
    "mode": st.sampled_from(["auto", "swap", "recompute"]),
    "long_prompt": st.sampled_from([None, 5]),
}
HINTS = st.builds(
    CacheHints,
    salt=st.sampled_from([None, None, "a"]),
    release=st.sampled_from([False, False, False, True]),
    warm=st.sampled_from([False, False, False, True]),
    priority=st.integers(-2, 2),
    prefix_key=st.sampled_from([None, "k"]),
)


class LoadMachine(RuleBasedStateMachine):
    @initialize(**POOLS)
    def start(self, num_blocks, num_host_blocks, seats, extra_budget, caching, policy, mode, long_prompt):
        self.load = Load(
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            max_num_seqs=seats,
            budget=seats + extra_budget,
            caching=caching,
            policy=policy,
            mode=mode,
            long_prompt=long_prompt,
        )

    @rule(
        pattern=st.integers(0, 2),
        length=st.integers(1, 14),
        max_tokens=st.integers(1, 14),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        hints=HINTS,
        retain=st.lists(st.integers(1, 20), max_size=2),
    )
    def arrive(self, pattern, length, max_tokens, n, hints, retain):
        # Few patterns, so that prefixes are shared, diverge and meet again.
        self.load.arrive([0 if i < 6 else pattern for i in range(length)], max_tokens, n, hints, retain)

    @rule()
    def step(self):
        self.load.step()

    @rule(seconds=st.integers(1, 30))
    def wait(self, seconds):
        self.load.now += seconds

    @rule(choice=st.integers(0, 100))
    def abort(self, choice):
        sequences = self.load.sequences
        if sequences:
            self.load.scheduler.abort(sequences[choice % len(sequences)].request_id)

    @rule()
    def reset(self):
        self.load.scheduler.kv_cache_manager.reset_prefix_cache(self.load.scheduler.running)

    @invariant()
    def blocks_are_conserved(self):
        if hasattr(self, "load"):
            self.load.scheduler.check_integrity()

    def teardown(self):
        if hasattr(self, "load"):
            self.load.finish()


LoadMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestLoadMachine = LoadMachine.TestCase


def run_random_load(seed: int, num_steps: int, **options) -> Load:
    """Arrivals faster than the pool can serve, so that it preempts all the time."""
    dice = random.Random(seed)
    load = Load(**options)
    for _ in range(num_steps):
        if len(load.sequences) < 12 and dice.random() < 0.5:
            prompt = [0] * min(6, dice.randint(1, 9)) + [dice.randrange(3) for _ in range(dice.randint(1, 20))]
            hints = CacheHints(
                salt=dice.choice([None, None, "a"]),
                release=dice.random() < 0.1,
                warm=dice.random() < 0.1,
                priority=dice.randint(-2, 2),
                prefix_key=dice.choice([None, "k"]),
            )
            retain = [dice.randint(1, 12)] if dice.random() < 0.3 else []
            load.arrive(prompt, dice.randint(1, 20), dice.choice([1, 1, 1, 3]), hints, retain)
        if load.sequences and dice.random() < 0.03:
            load.scheduler.abort(dice.choice(load.sequences).request_id)
        if dice.random() < 0.005:
            load.scheduler.kv_cache_manager.reset_prefix_cache(load.scheduler.running)
        load.step()
    load.finish()
    return load


LOADS = pytest.mark.parametrize(
    ("policy", "mode", "caching"),
    [
        ("fcfs", "swap", True),
        ("fcfs", "recompute", True),
        ("fcfs", "swap", False),
        ("priority", "auto", True),
        ("shortest", "swap", True),
        ("cache_aware", "swap", True),
    ],
)


@LOADS
def test_a_long_random_load(policy: str, mode: str, caching: bool):
    check_long_load(170, policy, mode, caching)


@pytest.mark.slow
@LOADS
def test_a_very_long_random_load(policy: str, mode: str, caching: bool):
    check_long_load(1700, policy, mode, caching)


def check_long_load(num_steps: int, policy: str, mode: str, caching: bool) -> None:
    options = {"num_blocks": 24, "num_host_blocks": 40, "max_num_seqs": 6, "budget": 16}
    load = run_random_load(1, num_steps, policy=policy, mode=mode, caching=caching, **options)
    run_random_load(2, num_steps, policy=policy, mode=mode, caching=caching, long_prompt=8, **options)
    preemptions, host = load.scheduler.preemptions, load.scheduler.kv_cache_manager.host
    assert load.scheduler.num_preemptions > 0, "the load does not press the pool"
    if mode == "swap":
        assert preemptions["swap"] > 0
        assert host.num_copied_in > 0
    if mode == "recompute":
        assert preemptions["swap"] == 0
