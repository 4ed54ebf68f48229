"""``pagedllm bench stall``: the gap that counts is one of the stream's own, after the prompt was sent."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import TinyModel
from typer.testing import CliRunner

from pagedllm.api import GenerateRequest
from pagedllm.bench.stall import StallPlan, measure_stall
from pagedllm.cli.main import app
from pagedllm.errors import ConfigError, EngineClosedError

PLAN = StallPlan(stream_input_len=4, stream_len=10, arrives_after=5, prompt_len=50, num_rounds=1, seed=0)


class SlowEngine:
    """Streams a token at a time, and holds up all streams while a long prompt is there."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.is_stalled = False

    def model_info(self) -> Any:
        return SimpleNamespace(vocab_size=100, eos_token_ids=())

    def reset_prefix_cache(self) -> None:
        self.is_stalled = False

    def stream(self, request: GenerateRequest) -> Iterator[Any]:
        assert isinstance(request.prompt, tuple)
        if len(request.prompt) == PLAN.prompt_len:
            if self.error is not None:
                raise self.error
            self.is_stalled = True
            yield SimpleNamespace(token_ids=(1,))
            return
        for _ in range(PLAN.stream_len):
            time.sleep(0.2 if self.is_stalled else 0.01)
            yield SimpleNamespace(token_ids=(1,))


def test_the_largest_gap_after_the_arrival_counts():
    engine: Any = SlowEngine()
    found = measure_stall(engine, PLAN)
    assert found["gap_before_ms"] < 100
    assert found["largest_gap_after_ms"] >= 200
    assert found["stretch"] == pytest.approx(found["largest_gap_after_ms"] / found["gap_before_ms"])


def test_a_prompt_that_fails_is_not_counted_as_fast():
    engine: Any = SlowEngine(EngineClosedError("gone"))
    with pytest.raises(EngineClosedError, match="gone"):
        measure_stall(engine, PLAN)


def test_a_plan_without_gaps_is_refused(tiny_model: TinyModel):
    result = CliRunner().invoke(app, ["bench", "stall", "--model", tiny_model.path, "--arrives-after", "63"])
    assert result.exit_code != 0
    assert isinstance(result.exception, (SystemExit, ConfigError))


def test_the_command(tiny_model: TinyModel, tmp_path: Path):
    file = tmp_path / "s.json"
    sizes = ["--stream-len", "12", "--arrives-after", "4", "--prompt-len", "100", "--rounds", "1", "--json", str(file)]
    result = CliRunner().invoke(app, ["bench", "stall", *sizes, "--model", tiny_model.path, "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert min(found[name] for name in ("gap_before_ms", "largest_gap_after_ms", "prompt_ttft_ms")) > 0
    assert found["prompt_len"] == 100
