"""Every scenario in a tiny form: its figures are there and agree with each other. No timing decides."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from served_engine import served

from pagedllm.api import Choice, RequestOutput, Timings, TokenLogprob, Usage
from pagedllm.bench.plot import new_figure
from pagedllm.bench.scenarios import SCENARIOS, Outcome, Setting
from pagedllm.bench.scenarios.parallel_sampling import minimum_blocks
from pagedllm.bench.scenarios.pressure import texts_agree
from pagedllm.config import EngineConfig
from pagedllm.errors import ConfigError, EngineError, InvalidRequestError
from pagedllm.local import LocalEngine

TINY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fragmentation": (
        {"max_num_seqs": 4},
        {
            "min_input_len": 20,
            "max_input_len": 60,
            "min_output_len": 150,
            "max_output_len": 250,
            "sample_every_s": 0.001,
        },
    ),
    "parallel-sampling": ({}, {"input_len": 40, "output_len": 22, "nums_choices": (1, 2, 4)}),
    "batching": ({}, {"num_requests": 16, "num_seats": 4, "short_len": 3, "long_len": 40}),
    "prefix": (
        {},
        {
            "shared_len": 64,
            "num_requests": 3,
            "pinned_len": 128,
            "unpinned_len": 64,
            "num_flood": 12,
            "flood_len": 48,
        },
    ),
    "pressure": ({}, {"num_requests": 8, "output_len": 60, "num_blocks": 26}),
    "tradeoff": ({}, {"nums_seqs": (1, 4), "num_rounds": 3}),
    "served": ({}, {"num_users": 2, "num_rounds": 1, "num_requests": 4, "input_len": 8, "output_len": 16}),
    "grammar": ({}, {"num_requests": 2, "num_rounds": 1, "input_len": 8, "output_len": 200}),
    "chatbot-slo": ({}, {"num_users": 6, "num_rounds": 2, "output_len": 20, "num_seats": 8, "num_seats_after": 2}),
}
Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def run(long_model: str) -> Run:
    """Run a scenario in its tiny form, once for all tests that look at it."""
    found: dict[str, Outcome] = {}

    def outcome_of(name: str) -> Outcome:
        if name not in found:
            options, changes = TINY[name]
            config = EngineConfig(model=long_model, dtype="float32", **options)
            plan = dataclasses.replace(SCENARIOS[name].plan, **changes)
            found[name] = SCENARIOS[name].run(Setting(config=config, open_engine=LocalEngine, serve=served), plan)
        return found[name]

    return outcome_of


def test_every_scenario_has_a_tiny_form() -> None:
    assert set(TINY) == set(SCENARIOS)


@pytest.mark.parametrize("name", TINY)
def test_draws_a_plot(name: str, run: Run) -> None:
    """A figure that matplotlib warns about, or that is empty, is not readable."""
    figure, file = new_figure(), io.BytesIO()
    SCENARIOS[name].draw(figure, run(name))
    figure.savefig(file, format="png")
    assert file.getvalue().startswith(b"\x89PNG")
    assert all(axes.has_data() for axes in figure.axes)


def test_fragmentation(run: Run) -> None:
    """Slots that were counted from other sequences than the tokens would give shares that fit no mean."""
    result = run("fragmentation").result
    assert 0 < result["unused_share_paged"] < result["block_size"] / result["mean_tokens"]
    assert result["unused_share_reserved"] == pytest.approx(
        1 - result["mean_tokens"] / result["max_model_len"], abs=1e-5
    )
    assert result["max_model_len"] == 2048
    assert 20 <= result["mean_tokens"] <= 310
    assert result["half_block_share"] == pytest.approx(8 / result["mean_tokens"], rel=1e-3)
    assert abs(result["drift"]) <= 1
    assert result["mean_running"] <= 4


def test_fragmentation_of_too_little_load_is_refused(long_model: str) -> None:
    """A mean over three samples looks like any other."""
    scenario = SCENARIOS["fragmentation"]
    plan = dataclasses.replace(scenario.plan, num_rounds=1, max_input_len=60, max_output_len=30)
    config = EngineConfig(model=long_model, max_num_seqs=4)
    with pytest.raises(InvalidRequestError, match="num_rounds"):
        scenario.run(Setting(config=config, open_engine=LocalEngine, serve=served), plan)


def test_served(run: Run) -> None:
    """Both ways do the same: two rounds of two users with 16 tokens each."""
    outcome = run("served")
    result = outcome.result
    assert set(outcome.series) == {"in_process", "served"}
    assert all(10 <= len(durations) <= 30 for durations in outcome.series.values())
    ratio = result["step_served_ms"] / result["step_in_process_ms"]
    assert result["step_ratio"] == pytest.approx(ratio, rel=1e-3)
    assert result["tokens_per_second_served"] > 0


def test_grammar(run: Run) -> None:
    """An answer that a grammar ended early would leave fewer steps to compare, and smaller ones."""
    outcome = run("grammar")
    result = outcome.result
    assert set(outcome.series) == {"free", "json", "regex"}
    assert all(100 <= len(durations) < 200 for durations in outcome.series.values())
    for way in ("json", "regex"):
        assert result[f"cost_{way}"] == pytest.approx(result[f"step_{way}_ms"] / result["step_free_ms"] - 1, abs=1e-4)


def test_served_reports_what_its_client_says(long_model: str) -> None:
    """A client that fails would otherwise end the run with a missing file."""
    scenario = SCENARIOS["served"]
    plan = dataclasses.replace(scenario.plan, **TINY["served"][1])
    nowhere = contextlib.nullcontext("http://127.0.0.1:9/v1")
    setting = Setting(config=EngineConfig(model=long_model), open_engine=LocalEngine, serve=lambda _: nowhere)
    with pytest.raises(EngineError, match="over HTTP"):
        scenario.run(setting, plan)


def test_parallel_sampling(run: Run) -> None:
    """The prompt's two full blocks are stored once; each answer has 8 + 21 tokens of its own, in two blocks."""
    outcome = run("parallel-sampling")
    assert outcome.series["n"] == [1, 2, 4]
    assert outcome.series["blocks_shared"] == [2 + n * 2 for n in (1, 2, 4)]
    assert outcome.series["blocks_unshared"] == [n * 4 for n in (1, 2, 4)]
    result = outcome.result
    assert (result["n"], result["children"], result["prompt_blocks"]) == (4, 3, 2)
    assert result["blocks_minimum"] <= result["blocks_shared"] <= result["blocks_minimum"] + result["children"]
    assert result["bytes_shared"] == 10 * result["block_bytes"]


@given(st.integers(1, 300), st.integers(1, 100), st.integers(1, 9), st.sampled_from([1, 4, 16]))
def test_one_tail_block_for_each_child_is_enough(
    num_prompt_tokens: int, num_new_tokens: int, num_choices: int, block_size: int
) -> None:
    full, tail = divmod(num_prompt_tokens, block_size)
    shared = full + num_choices * -(-(tail + num_new_tokens) // block_size)
    minimum = minimum_blocks(num_prompt_tokens, num_new_tokens, num_choices, block_size)
    assert minimum <= shared <= minimum + num_choices - 1


def test_batching(run: Run) -> None:
    """Padding that is counted as output, or steps of the wrong batch, would flatter one of the ways."""
    result = run("batching").result
    assert result["num_tokens"] == 4 * 40 + 12 * 3
    for way in ("padded", "dropped"):
        # Rows of a batch may arrive in up to four steps.
        assert 4 * 40 <= result[f"{way}_steps"] <= 4 * (40 + 3)
    assert result["num_tokens"] / 4 <= result["continuous_steps"] < result["padded_steps"]
    assert result["step_ratio"] == pytest.approx(result["padded_steps"] / result["continuous_steps"], rel=1e-4)
    for way in ("padded", "dropped"):
        ratio = result["continuous_tokens_per_second"] / result[f"{way}_tokens_per_second"]
        assert result[f"throughput_ratio_{way}"] == pytest.approx(ratio, rel=1e-3)
    latency = result["continuous_mean_latency_s"] / result["padded_mean_latency_s"]
    assert result["latency_ratio"] == pytest.approx(latency, rel=1e-2)
    # An answer handed out with its batch comes no sooner than its last token.
    assert result["latency_ratio_returned"] <= result["latency_ratio"]


def test_prefix(run: Run) -> None:
    """A pin that the flood evicts, or that never ends, is no pin."""
    outcome = run("prefix")
    result = outcome.result
    assert result["cached_tokens"] == 64
    assert (result["pinned_tokens"], result["unpinned_tokens"]) == (128, 64)
    assert result["pinned_tokens_after_flood"] == 128
    assert result["unpinned_tokens_after_flood"] == 0
    assert result["pinned_tokens_after_ttl"] == 0
    assert result["ttft_cold_ms"] > 0
    assert result["ttft_warm_ms"] > 0
    assert result["ttft_ratio"] == pytest.approx(result["ttft_warm_ms"] / result["ttft_cold_ms"], rel=1e-2)
    assert len(outcome.series["cold_ms"]) == len(outcome.series["warm_ms"]) == 3


def test_pressure(run: Run) -> None:
    result = run("pressure").result
    assert result["texts_equal"] is True
    for mode in ("swap", "recompute", "auto"):
        assert result[f"{mode}_preemptions"] > 0
        assert result[f"{mode}_steps"] > result["roomy_steps"]
    assert result["swap_preemptions_by_swap"] == result["swap_preemptions"]
    assert result["swap_swapped_in_blocks"] > 0
    assert result["recompute_swapped_in_blocks"] == result["recompute_swapped_out_blocks"] == 0
    assert result["preemptions"] == sum(result[f"{mode}_preemptions"] for mode in ("swap", "recompute", "auto"))


def output(*token_ids: int, gap: float = 1.0) -> RequestOutput:
    """An answer whose every token was better than the second best by ``gap``."""
    logprobs = tuple(
        TokenLogprob(item, "", -0.5, (TokenLogprob(item, "", -0.5), TokenLogprob(99, "", -0.5 - gap)))
        for item in token_ids
    )
    return RequestOutput(
        request_id="r",
        choices=(Choice(text="", token_ids=token_ids, finish_reason="length", logprobs=logprobs),),
        usage=Usage(prompt_tokens=1, completion_tokens=len(token_ids), cached_tokens=0),
        timings=Timings(queue_s=0, ttft_s=0, total_s=0),
    )


@pytest.mark.parametrize(
    ("roomy", "tight", "expected"),
    [
        (output(1, 2, 3), output(1, 2, 3), (True, 0)),
        (output(1, 2, 3), output(1, 7, 8), (False, 0)),
        (output(1, 2, 3, gap=5e-5), output(1, 7, 8), (True, 1)),
        (output(1, 2, 3, gap=5e-5), output(1, 2), (False, 0)),
    ],
)
def test_only_near_ties_excuse_another_text(
    roomy: RequestOutput, tight: RequestOutput, expected: tuple[bool, int]
) -> None:
    assert texts_agree([roomy], [tight]) == expected


def test_tradeoff(run: Run) -> None:
    """A prediction made of the measurement itself would always be right."""
    curve = run("tradeoff").result["curve"]
    assert [point["max_num_seqs"] for point in curve] == [1, 4]
    for point in curve:
        assert point["predicted_tokens_per_second"] == pytest.approx(
            1000 * point["max_num_seqs"] / point["step_ms"], rel=1e-2
        )
        error = point["predicted_tokens_per_second"] / point["tokens_per_second"] - 1
        assert point["error"] == pytest.approx(error, abs=1e-3)
        assert point["itl_p50_ms"] <= point["itl_p95_ms"] <= point["itl_p99_ms"] <= point["e2e_p99_ms"]
    assert run("tradeoff").result["max_error"] == max(abs(point["error"]) for point in curve)


def test_chatbot_slo(run: Run) -> None:
    outcome = run("chatbot-slo")
    result, series = outcome.result, outcome.series
    assert series["stage"] == ["before", "max_num_seqs", "prefix caching", "max_model_len"]
    assert (result["before"], result["after"]) == (series["itl_p95_ms"][0], series["itl_p95_ms"][-1])
    assert result["before_meets_target"] == (result["before"] <= result["target_ms"])
    assert series["cached_tokens"][:2] == [0, 0]
    assert min(series["cached_tokens"][2:]) > 0
    assert result["after_kv_pool_bytes"] < result["before_kv_pool_bytes"]


def test_an_option_that_a_scenario_sets_itself_is_refused() -> None:
    """Else the user would believe that it had counted."""
    with pytest.raises(ConfigError, match=r"max_num_seqs.*batching"):
        SCENARIOS["batching"].check(EngineConfig(max_num_seqs=4))
    SCENARIOS["batching"].check(EngineConfig(block_size=32))


def test_a_scale_multiplies_requests_but_leaves_enough() -> None:
    scenario = SCENARIOS["batching"]
    assert scenario.scaled_plan(1.0) == scenario.plan
    assert scenario.scaled_plan(2.0).num_requests == 256
    assert scenario.scaled_plan(0.01).num_requests == 16
