"""The cookbook's short programs: over engines of the tests, and with their own model as users run them."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from typing import Any

import adapter_overhead
import agent_tools
import batch_and_async
import lcel_streaming
import pytest
import structured_output
from fake_engine import FakeEngine

from langchain_pagedllm import ChatPagedLLM, PagedLLM
from pagedllm.local import LocalEngine


def run_script(module: Any, *arguments: str) -> dict[str, Any]:
    """The last line of a program, which is JSON."""
    run = subprocess.run(
        [sys.executable, module.__file__, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_lcel_streaming() -> None:
    """A scope that ends nothing would show as all tokens of the stopped answer."""
    engine = FakeEngine(chunk_size=1)
    report = lcel_streaming.run(ChatPagedLLM(engine=engine, temperature=0, max_tokens=32))
    assert report["pieces"] == report["output_tokens"] == 32
    assert report["async_is_equal"]
    assert report["is_beginning"]
    assert report["tokens_of_stopped"] <= 3 + 2
    assert report["still_running"] == 0
    assert report["cached_tokens"] > 0
    assert engine.num_aborts == 1


def test_batch_and_async(tiny_engine: LocalEngine) -> None:
    report = batch_and_async.run(ChatPagedLLM(engine=tiny_engine, temperature=0, max_tokens=8, ignore_eos=True), 6)
    assert report["equal_answers"] == 6
    assert report["output_tokens"] == 48
    assert sorted(report["order_of_ends"]) == list(range(6))
    # The short answers are the odd ones.
    assert set(report["order_of_ends"][:2]) <= {1, 3, 5}
    assert report["num_running_peak"] >= 4
    assert set(report["seconds"]) == {"one by one", "batch", "abatch", "batch, 2 at a time"}


@pytest.mark.parametrize(
    ("expression", "want"),
    [
        ("17 * 24", "17 * 24 = 408"),
        ("-(1 + 2) / 4", "-(1 + 2) / 4 = -0.75"),
        ("1 / 0", "Cannot compute '1 / 0': float division by zero"),
        ("2 ** 9", "only numbers"),
        ("__import__('os')", "only numbers"),
        ("open", "only numbers"),
        ("1 +", "Cannot compute"),
    ],
)
def test_calculator_computes_and_runs_nothing(expression: str, want: str) -> None:
    """A tool's arguments are written by a model, so they are a stranger's."""
    assert want in agent_tools.calculate.invoke({"expression": expression})


def test_stations() -> None:
    assert "1105" in agent_tools.station_height.invoke({"station": "Coldwater "})
    assert "no station 'Nowhere'" in agent_tools.station_height.invoke({"station": "Nowhere"})


def test_adapter_overhead() -> None:
    """Ways that generate different numbers of tokens could not be compared."""
    engine = FakeEngine()
    fields: dict[str, Any] = {"engine": engine, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    report = adapter_overhead.run(PagedLLM(**fields), ChatPagedLLM(**fields), batch_size=4, num_rounds=2)
    assert len(engine.requests) == 3 * 4 * 4
    assert engine.stats().num_generated_tokens == 3 * 4 * 4 * 8
    assert engine.stats().prefix_hits == 0
    assert set(report["of_the_engine"]) == {"llm.batch", "chat.abatch"}
    assert set(report["caller_ms_per_prompt"]) == set(adapter_overhead.WAYS)
    assert all(rate > 0 for rate in report["tokens_per_second"].values())


@pytest.mark.model
@pytest.mark.parametrize("module", [lcel_streaming, batch_and_async], ids=lambda module: module.__name__)
def test_script(module: Any) -> None:
    arguments = ["--max-tokens", "8"] + (["--questions", "2"] if module is batch_and_async else [])
    assert run_script(module, *arguments)


@pytest.mark.model
def test_structured_output() -> None:
    """What the model says is its own; the form is not."""
    report = run_script(structured_output)
    assert structured_output.Person(**report["person"])
    assert report["parsed_is_equal"]
    assert report["choice"] in ("good", "bad")
    assert len(report["date"]) == 10
    assert report["cut_is_reported"]


@pytest.mark.model
def test_agent_of_six_turns_computes_its_new_tokens_only() -> None:
    """A prompt that a template or a tool's answer changes from turn to turn would be computed anew each time."""
    turns = run_script(agent_tools)["turns"]
    assert len(turns) == 6
    assert [len(turn["calls"]) for turn in turns] == [1, 0, 1, 0, 1, 0]
    assert {name for turn in turns for name, _ in turn["calls"]} <= {"station_height", "calculate"}
    for before, turn in itertools.pairwise(turns):
        assert turn["cached_tokens"] >= before["prompt_tokens"] - 16
        assert turn["prompt_tokens"] > before["prompt_tokens"]
