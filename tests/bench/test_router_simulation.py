"""The simulation of routers: conserved requests, plausible times, and files that are read or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedllm.bench.router.costs import StepCosts, fit_costs, read_costs
from pagedllm.bench.router.policies import POLICIES
from pagedllm.bench.router.report import figures, table
from pagedllm.bench.router.simulation import ReplicaPlan, simulate
from pagedllm.bench.router.traces import TraceRequest, conversations, read_trace, scaled
from pagedllm.errors import ConfigError

COSTS = StepCosts(step_s=0.01, prompt_token_s=0.001, decode_s=0.002)
PLAN = ReplicaPlan(costs=COSTS, num_blocks=1024)


def test_one_request_takes_what_its_steps_take():
    """Two steps of a prompt of 600 tokens, then four of one token each: 0.62 s to the first, 0.048 s more."""
    request = TraceRequest(arrival_s=5.0, prompt=((0, 600),), output_len=5)
    result = simulate([request], PLAN, policy="prefix", num_replicas=3)
    (served,) = result.served
    assert served.ttft_s == pytest.approx(0.62)
    assert served.total_s == pytest.approx(0.62 + 4 * 0.012)
    assert sum(result.running_tokens) == pytest.approx(600, abs=5)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_served(policy: str) -> None:
    trace = scaled(conversations(120, seed=1, num_sessions=12), rate=4.0, seed=2)
    result = simulate(trace, PLAN, policy=policy, num_replicas=3)
    assert len(result.served) == len(result.decision_s) == 120
    assert all(0 < item.ttft_s <= item.total_s for item in result.served)
    assert all(item.num_cached_tokens < item.num_prompt_tokens for item in result.served)
    again = simulate(trace, PLAN, policy=policy, num_replicas=3)
    assert again.served == result.served, "the same seeds, the same run"


def test_prefix_routing_finds_more_than_others():
    """The figures of docs/scaling.md rest on this; the trace is too large for one pool."""
    trace = scaled(conversations(400, seed=1, num_sessions=48), rate=4.0, seed=2)
    rows = {name: figures(simulate(trace, PLAN, policy=name, num_replicas=4)) for name in ("prefix", "power_of_two")}
    assert rows["prefix"]["cached_share"] > 1.5 * rows["power_of_two"]["cached_share"]
    assert rows["prefix"]["ttft_p50_ms"] < 0.8 * rows["power_of_two"]["ttft_p50_ms"]
    assert rows["prefix"]["imbalance"] < 1.4
    lines = table(list(rows.values())).split("\n")
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1


def test_costs_are_fitted():
    rows = [(tokens, 0, COSTS.duration(tokens, 0)) for tokens in (16, 64, 256, 512)]
    rows += [(0, size, COSTS.duration(0, size)) for size in (1, 4, 16, 32)]
    fitted = fit_costs(rows, source="made up")
    assert fitted.step_s == pytest.approx(COSTS.step_s)
    assert fitted.prompt_token_s == pytest.approx(COSTS.prompt_token_s)
    assert fitted.decode_s == pytest.approx(COSTS.decode_s)
    # Where a part would be negative it is left out.
    falling = fit_costs([(16, 0, 0.1), (512, 0, 0.1), (0, 1, 0.2), (0, 32, 0.1)], source="made up")
    assert min(falling.step_s, falling.prompt_token_s, falling.decode_s) >= 0


def test_trace_file(tmp_path: Path) -> None:
    """Equal ids are equal tokens; tokens after the last id are the line's own."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 2000, "input_length": 1100, "output_length": 7, "hash_ids": [5, 9, 11]},
        {"timestamp": 0, "input_length": 1024, "output_length": 3, "hash_ids": [5, 9]},
        {"timestamp": 3000, "input_length": 600, "output_length": 3, "hash_ids": [5]},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    first, second, third = read_trace(path)
    assert (first.arrival_s, first.output_len, second.arrival_s) == (0.0, 3, 2.0)
    assert [len(item.token_ids()) for item in (first, second, third)] == [1024, 1100, 600]
    assert second.token_ids()[:1024] == first.token_ids()
    assert third.token_ids()[512:] != first.token_ids()[512:600]
    assert len(read_trace(path, max_requests=1)) == 1


NO_TOKENS = json.dumps({"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []})


@pytest.mark.parametrize("text", ["", "{", '{"timestamp": 0}', NO_TOKENS])
def test_wrong_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"trace\.jsonl"):
        read_trace(path)


@pytest.mark.parametrize("text", ["", "[]", '{"step_s": 1}', '{"step_s": -1, "prompt_token_s": 0, "decode_s": 0}'])
def test_wrong_costs_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"costs\.json"):
        read_costs(path)
