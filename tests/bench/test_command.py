"""``pagedllm bench`` on a tiny model: what it prints and writes adds up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyModel
from typer.testing import CliRunner

from pagedllm.cli.main import app

SPREAD = {"mean", "p50", "p95", "p99"}
Bench = Callable[..., Any]


@pytest.fixture
def bench(tiny_model: TinyModel) -> Bench:
    def run(*arguments: object) -> Any:
        common = ["--model", tiny_model.path, "--dtype", "float32"]
        return CliRunner().invoke(app, ["bench", *map(str, arguments), *common])

    return run


def read_trace(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_throughput(tmp_path: Path, bench: Bench) -> None:
    """Wrong counts make wrong rates, and nothing else would show it."""
    figures_file, trace_file = tmp_path / "f.json", tmp_path / "t.jsonl"
    sizes = ("--input-len", 20, "--output-len", 6, "--num-prompts", 3)
    result = bench("throughput", *sizes, "--json", figures_file, "--trace", trace_file, "--max-num-seqs", 2)
    assert result.exit_code == 0, result.output
    assert "decode tok/s" in result.stdout
    assert "{" not in result.stdout

    found = json.loads(figures_file.read_text())
    assert (found["num_prompts"], found["input_len"], found["output_len"]) == (3, 20, 6)
    for name in ("prefill_tokens_per_second", "decode_tokens_per_second", "output_tokens_per_second", "duration_s"):
        assert found[name] > 0
    for name in ("ttft_ms", "itl_ms"):
        assert set(found[name]) == SPREAD
        assert found[name]["p50"] <= found[name]["p95"] <= found[name]["p99"]
    assert found["output_tokens_per_second"] == pytest.approx(18 / found["duration_s"], rel=0.1)
    assert found["prefill_tokens_per_second"] == pytest.approx(60 / found["prefill_s"], rel=0.1)
    assert (found["dtype"], found["num_cached_tokens"]) == ("float32", 0)
    assert found["kernels"] in ("cpu", "reference")
    assert found["engine_args"]["max_num_seqs"] == 2
    assert {"python", "torch", "langchain-pagedllm"} <= set(found["versions"])
    assert found["machine"]["cpu"]

    steps = read_trace(trace_file)
    for phase, output_len in (("prefill", 1), ("run", 6)):
        of_phase = [step for step in steps if step["phase"] == phase]
        # Each token but the last of an answer is computed once.
        assert sum(step["num_tokens"] for step in of_phase) == 3 * (20 + output_len - 1)
        assert sum(step["num_admitted"] for step in of_phase) == 3
        assert sum(step["num_retired"] for step in of_phase) == 3
        assert max(step["num_running"] + step["num_retired"] for step in of_phase) == 2
        assert of_phase[-1]["num_running"] == of_phase[-1]["num_waiting"] == 0
    assert all(0 <= step["kv_cache_usage"] <= 1 and step["duration_s"] > 0 for step in steps)


def test_several_sizes_give_a_line_of_json_each(tmp_path: Path, bench: Bench) -> None:
    file = tmp_path / "f.json"
    result = bench("throughput", "--input-len", 8, "--output-len", 3, "--num-prompts", "1,4", "--json", file)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [line["n"] for line in lines] == [1, 4]
    assert all(line["prefill_s"] > 0 and line["total_s"] > 0 for line in lines)
    assert [found["num_prompts"] for found in json.loads(file.read_text())] == [1, 4]


def test_trace_shows_preemption(tmp_path: Path, bench: Bench) -> None:
    """A figure that was measured while sequences were thrown out should say so."""
    figures_file, trace_file = tmp_path / "f.json", tmp_path / "t.jsonl"
    sizes = ("--input-len", 16, "--output-len", 60, "--num-prompts", 4, "--max-model-len", 96)
    pool = ("--kv-cache-memory-bytes", 12 * 16 * 768)
    result = bench("throughput", *sizes, *pool, "--json", figures_file, "--trace", trace_file)
    assert result.exit_code == 0, result.output
    preempted = sum(step["num_preempted"] for step in read_trace(trace_file) if step["phase"] == "run")
    assert json.loads(figures_file.read_text())["num_preempted"] == preempted > 0


def test_latency(tmp_path: Path, bench: Bench) -> None:
    file = tmp_path / "f.json"
    sizes = ("--input-len", 8, "--output-len", 4, "--batch-size", 2, "--num-iters", 3, "--num-iters-warmup", 1)
    result = bench("latency", *sizes, "--json", file)
    assert result.exit_code == 0, result.output
    assert "batch latency in ms: mean" in result.stdout
    found = json.loads(file.read_text())
    assert (found["num_prompts"], found["num_iters"], found["num_iters_warmup"]) == (2, 3, 1)
    assert set(found["latency_ms"]) == SPREAD
    assert found["latency_ms"]["mean"] == pytest.approx(1000 * found["duration_s"] / 3, rel=0.1)


def test_what_does_not_fit_is_one_clear_line(bench: Bench) -> None:
    result = bench("throughput", "--input-len", 600)
    assert result.exit_code == 1
    assert "600 tokens" in result.stderr
    assert "Traceback" not in result.output


def test_one_token_of_output(tmp_path: Path, bench: Bench) -> None:
    file = tmp_path / "f.json"
    result = bench("throughput", "--input-len", 8, "--output-len", 1, "--num-prompts", 2, "--json", file)
    assert result.exit_code == 0, result.output
    assert json.loads(file.read_text())["itl_ms"] is None
