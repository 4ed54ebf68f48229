"""``pagedllm bench roofline``: every second of a step has a place, and every share is that of its own bound."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyModel
from typer.testing import CliRunner

from pagedllm.bench.parts import StepTimes
from pagedllm.bench.roofline import RooflinePlan, _mean_parts, _r_squared, _shares, measure_roofline
from pagedllm.cli.main import app
from pagedllm.config import EngineConfig
from pagedllm.errors import ConfigError

PLAN = RooflinePlan(
    batch_sizes=(1, 3), input_len=8, output_len=6, prefill_lens=(20,), contexts=(4, 8, 16), num_rounds=2, seed=0
)
MARKS = ("schedule", "scheduled", "run", "ran", "update", "updated", "retire", "retired")


def step(start: float, times: list[float], kernels: dict[str, float]) -> StepTimes:
    made = StepTimes()
    made.marks = {name: start + time for name, time in zip(MARKS, times, strict=True)}
    made.kernels = kernels
    return made


def test_every_second_of_a_step_has_one_place():
    """A second that is counted twice, or never, makes the engine look better or worse than it is."""
    one = step(10.0, [0, 1, 3, 20, 24, 25, 30, 32], {"linear": 9.0, "paged_attention": 5.0})
    parts = one.parts()
    assert parts == {
        "kernel_linear": 9,
        "kernel_paged_attention": 5,
        "between_kernels": 3,
        "scheduler": 1 + 1 + 2,
        "forward_batch": 2,
        "sampler": 4,
        "detokenizer": 5,
    }
    assert sum(parts.values()) == one.end - one.start


def test_steps_that_compute_prompts_are_left_out_of_the_parts():
    times = [0.0, 1, 1, 3, 3, 3, 3, 4]
    steps = [step(0, times, {"linear": 1.0}), step(100, times, {"linear": 9.0}), step(107, times, {"linear": 2.0})]
    assert _mean_parts(steps, [False, False, True])["kernel_linear"] == 2
    assert _mean_parts(steps, [True, True, True])["between_steps"] == ((100 - 4) + (107 - 104)) / 2


def test_a_share_is_the_median_of_each_rounds_own():
    """A machine twice as fast in one round must not pair its figure with the bound of another."""
    assert _shares({8: [60.0, 120.0, 30.0]}, {8: [100.0, 200.0, 50.0]})["8"]["share"] == pytest.approx(0.6)


def test_r_squared():
    assert _r_squared([1, 2, 4], [3.0, 5.0, 9.0]) == pytest.approx(1.0)
    assert (_r_squared([1, 2, 4], [3.0, 9.0, 3.0]) or 0.0) < 0.2
    assert _r_squared([1, 2], [3.0, 5.0]) is None


@pytest.fixture
def bench(tiny_model: TinyModel) -> Callable[..., Any]:
    def run(*arguments: object) -> Any:
        common = ["--model", tiny_model.path, "--dtype", "float32"]
        return CliRunner().invoke(app, ["bench", "roofline", *map(str, arguments), *common])

    return run


def test_the_command(tmp_path: Path, bench: Callable[..., Any]):
    file = tmp_path / "r.json"
    sizes = ("--batch-sizes", "1,3", "--input-len", 8, "--output-len", 6, "--prefill-lens", 20, "--contexts", "4,8,16")
    result = bench(*sizes, "--rounds", 2, "--json", file)
    assert result.exit_code == 0, result.output
    assert "outside kernels" not in result.stdout, "no batch of 32 was asked for"
    found = json.loads(file.read_text())
    assert set(found["decode"]) == {"1", "3"}
    assert set(found["prefill"]) == {"20"}
    for entry in (*found["decode"].values(), *found["prefill"].values()):
        assert set(entry) == {"tokens_per_second", "bound_tokens_per_second", "share"}
        assert min(entry.values()) > 0
    assert {"1", "3", "512"} == set(found["linear"])
    assert found["read_gb_per_second"] > 0
    assert list(found["context"]["lengths"]) == ["4", "8", "16"]
    assert (found["outside_kernels_share"], found["num_rounds"]) == (None, 2)


def test_a_batch_of_32_is_taken_apart(bench: Callable[..., Any], tmp_path: Path):
    file = tmp_path / "r.json"
    result = bench("--batch-sizes", 32, "--output-len", 4, "--prefill-lens", 4, "--contexts", 4, "--json", file)
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    parts = found["step_seconds"]
    inside = sum(seconds for name, seconds in parts.items() if name.startswith("kernel_"))
    assert {"kernel_linear", "kernel_paged_attention", "sampler", "between_steps"} <= set(parts)
    assert 0 < found["outside_kernels_share"] < 1
    assert 0 < inside < sum(parts.values())


def test_a_plan_that_does_not_fit_is_refused(tiny_model: TinyModel):
    config = EngineConfig(model=tiny_model.path, dtype="float32", max_model_len=16)
    with pytest.raises(ConfigError, match="max_model_len is 16"):
        measure_roofline(config, PLAN)
