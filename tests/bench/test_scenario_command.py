"""``pagedllm bench scenario`` and ``bench scheduler`` on the command line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from pagedllm.bench.scenarios import SCENARIOS
from pagedllm.bench.scheduler_cost import SchedulerPlan, _fill, measure_policies
from pagedllm.cli.bench_scenario import ScenarioName
from pagedllm.cli.main import app
from pagedllm.control.kv_cache_manager import KVCacheManager


def bench(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_all_scenarios_are_on_the_command_line() -> None:
    assert [name.value for name in ScenarioName] == list(SCENARIOS)


def test_writes_figures_and_plot(tmp_path: Path, long_model: str) -> None:
    figures, plot = tmp_path / "f.json", tmp_path / "f.png"
    files = ("--json", figures, "--plot", plot)
    result = bench("scenario", "parallel-sampling", "--model", long_model, "--block-size", 32, *files)
    assert result.exit_code == 0, result.output
    assert "blocks_shared" in result.stdout
    found = json.loads(figures.read_text())
    assert found["scenario"] == "parallel-sampling"
    assert found["result"]["children"] == found["result"]["n"] - 1 == 7
    assert found["plan"]["input_len"] == 250
    assert found["engine_args"]["block_size"] == 32
    assert {"python", "torch"} <= set(found["versions"])
    assert found["machine"]["cpu"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_wrong_options_are_one_line(long_model: str) -> None:
    for arguments, text in (
        (("batching", "--max-num-seqs", 4), "max_num_seqs"),
        (("parallel-sampling", "--scale", 2), "--scale"),
        (("parallel-sampling", "--max-num-seqs", 4), "at least 8"),
        (("novelty",), "fragmentation"),
    ):
        result = bench("scenario", *arguments, "--model", long_model)
        assert result.exit_code == 2
        assert text in result.stderr
        assert "Traceback" not in result.output


def test_scheduler(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    sizes = ("--num-running", 4, "--num-waiting", 8, "--num-steps", 20, "--cached-blocks", 10, "--cached-blocks", 200)
    result = bench("scheduler", *sizes, "--json", file)
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert found["plan"]["nums_cached_blocks"] == [10, 200]
    for policy in ("fcfs", "priority", "shortest", "cache_aware"):
        ratio = found["result"][f"{policy}_200_median_us"] / found["result"][f"{policy}_10_median_us"]
        assert abs(found["result"][f"{policy}_ratio"] - ratio) < 1e-2 * ratio


def test_scheduler_is_measured_with_all_seats_taken_and_that_much_cached() -> None:
    """An empty queue or cache costs little, whatever its size is said to be."""
    manager = KVCacheManager(num_blocks=200, block_size=16)
    _fill(manager, 150, random.Random(0))
    assert manager.usage.num_cached == 150
    result = measure_policies(SchedulerPlan(num_running=2, num_waiting=3, nums_cached_blocks=(5,), num_steps=5))
    assert result["max_ratio"] == 1.0
    assert result["max_median_us"] > 0
