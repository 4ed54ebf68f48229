"""What a benchmark sends and what its figures are, on made-up steps and times."""

from __future__ import annotations

import numpy as np
import pytest

from pagedllm.bench.report import decode_rate, figures, spread, table, trace_lines
from pagedllm.bench.timing import BatchRun, Measurement
from pagedllm.bench.workloads import Workload, random_requests
from pagedllm.core import StepRecord

WORKLOAD = Workload(num_prompts=2, input_len=100, output_len=3)


def step(time_s: float, duration_s: float, num_tokens: int, **counts: int) -> StepRecord:
    values = {"num_admitted": 0, "num_retired": 0, "num_preempted": 0, "num_running": 2, "num_waiting": 0} | counts
    return StepRecord(step=1, time_s=time_s, duration_s=duration_s, num_tokens=num_tokens, kv_cache_usage=0.5, **values)


def batch(duration_s: float, ttft_s: list[float], gaps_s: list[float], steps: list[StepRecord]) -> BatchRun:
    num_tokens = len(ttft_s) + len(gaps_s)
    return BatchRun(
        duration_s=duration_s,
        ttft_s=ttft_s,
        gaps_s=gaps_s,
        num_output_tokens=num_tokens,
        num_cached_tokens=0,
        steps=steps,
    )


STEPS = [
    step(0.0, 1.0, 200, num_admitted=2),
    step(1.5, 0.5, 2),  # with the half second before it: 1 s
    step(2.0, 1.0, 2, num_retired=2, num_running=0),
]


def test_decode_rate_counts_the_gaps_between_steps() -> None:
    """Without them, an engine that is slow outside its steps looks fast."""
    assert decode_rate([STEPS]) == 4 / 2.0


@pytest.mark.parametrize(
    "other",
    [
        step(3.0, 5.0, 101, num_admitted=1),  # a prompt beside a decoding sequence
        step(3.0, 5.0, 65),  # a later chunk of it
        step(3.0, 5.0, 2, num_admitted=1),  # resumed with a single token
    ],
)
def test_decode_rate_leaves_out_steps_that_compute_prompts(other: StepRecord) -> None:
    assert decode_rate([[*STEPS, other]]) == 4 / 2.0


def test_decode_rate_does_not_reach_across_batches() -> None:
    """The time between two batches is the benchmark's, not the engine's."""
    late = [step(100.0, 1.0, 200, num_admitted=2), step(101.0, 1.0, 2)]
    assert decode_rate([STEPS, late]) == 6 / 3.0
    assert decode_rate([[STEPS[0]], []]) is None


def test_spread() -> None:
    values = [float(value) for value in range(1, 102)]
    assert spread(values) == {"mean": 51.0, "p50": 51.0, "p95": 96.0, "p99": 100.0}
    assert spread([]) is None


def test_figures() -> None:
    prefill = batch(0.5, [0.4, 0.5], [], [STEPS[0]])
    run = batch(3.0, [0.5, 1.0], [1.0, 1.0, 1.0, 2.0], STEPS)
    found = figures(Measurement(workload=WORKLOAD, warmups=[batch(9.0, [9.0], [], [])], prefills=[prefill], runs=[run]))
    assert found["prefill_tokens_per_second"] == 200 / 0.5
    assert found["decode_tokens_per_second"] == 2.0
    assert found["output_tokens_per_second"] == 6 / 3
    assert found["ttft_ms"]["mean"] == 750.0
    assert found["itl_ms"]["p50"] == 1000.0
    assert found["latency_ms"]["p99"] == 3000.0
    assert (found["num_prompts"], found["num_iters"], found["num_iters_warmup"]) == (2, 1, 1)
    assert "400.0" in table([found])


def test_figures_of_one_token_have_no_gaps() -> None:
    one = batch(0.5, [0.4, 0.5], [], [STEPS[0]])
    found = figures(Measurement(workload=WORKLOAD, prefills=[one], runs=[one]))
    assert (found["itl_ms"], found["decode_tokens_per_second"]) == (None, None)
    assert " - " in table([found])


def test_trace_says_what_a_step_belongs_to() -> None:
    one = batch(0.5, [0.4, 0.5], [], [STEPS[0]])
    run = batch(3.0, [0.5, 1.0], [1.0] * 4, STEPS)
    lines = list(trace_lines(Measurement(workload=WORKLOAD, warmups=[one], prefills=[one], runs=[run])))
    assert [line["phase"] for line in lines] == ["warmup", "prefill", "run", "run", "run"]
    assert lines[-1]["num_retired"] == 2


def test_prompts_share_no_prefix_and_are_repeatable() -> None:
    def draw(seed: int) -> list[tuple[int, ...]]:
        workload = Workload(num_prompts=200, input_len=5, output_len=7)
        rng = np.random.default_rng(seed)
        requests = random_requests(workload, rng, vocab_size=300, eos_token_ids=(2, 7))
        assert all(item.sampling.max_tokens == 7 and item.sampling.ignore_eos for item in requests)
        return [item.prompt for item in requests if isinstance(item.prompt, tuple)]

    prompts = draw(0)
    assert len({prompt[0] for prompt in prompts}) == len(prompts) == 200
    assert {len(prompt) for prompt in prompts} == {5}
    assert not {2, 7} & {token_id for prompt in prompts for token_id in prompt}
    assert prompts == draw(0) != draw(1)


def test_more_prompts_than_first_tokens() -> None:
    workload = Workload(num_prompts=50, input_len=2, output_len=1)
    requests = random_requests(workload, np.random.default_rng(0), vocab_size=10, eos_token_ids=())
    assert len(requests) == 50
