"""What a server in the same process takes from the engine: the same work, asked for from here and over HTTP."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ...errors import EngineError
from ..load import ask_with_users
from .setting import Bench, Outcome, Scenario, Setting
from .steps import draw_spread, full_steps_ms

__all__ = ["SCENARIO", "ServedPlan"]

_CLIENT = "from pagedllm.cli import run; run()"


@dataclass(frozen=True, kw_only=True)
class ServedPlan:
    """Users who each ask their next question when they have the answer to their last.

    Args:
        num_users: How many, and seats for them.
        num_rounds: How often each way is measured, one after the other.
        num_requests: Questions in a round.
        input_len: Tokens of each.
        output_len: Tokens generated for each.
    """

    num_users: int = 16
    num_rounds: int = 3
    num_requests: int = 64
    input_len: int = 128
    output_len: int = 64


def run(setting: Setting, plan: ServedPlan) -> Outcome:
    """Let the users ask in this process, and then from another one over HTTP.

    Compared are the steps in which every seat computes one token: the same work either way.

    Raises:
        EngineError: A request over HTTP failed.
        InvalidRequestError: The plan leaves no such step.
    """
    steps_ms: dict[str, list[float]] = {"in_process": [], "served": []}
    rates: dict[str, list[float]] = {"in_process": [], "served": []}
    with setting.engine(max_num_seqs=plan.num_users) as bench, setting.serve(bench.engine) as base_url:
        for number in range(plan.num_rounds):
            for way in steps_ms:
                bench.engine.reset_prefix_cache()
                bench.take_steps()
                rate = _ask_here(bench, plan) if way == "in_process" else _ask_over_http(base_url, plan, number)
                rates[way].append(rate)
                steps_ms[way] += full_steps_ms(bench.take_steps(), plan.num_users, plan.output_len)
    result: dict[str, Any] = {}
    for way, durations in steps_ms.items():
        result[f"step_{way}_ms"] = round(median(durations), 3)
        result[f"tokens_per_second_{way}"] = round(median(rates[way]), 3)
    result["step_ratio"] = round(result["step_served_ms"] / result["step_in_process_ms"], 6)
    result["throughput_ratio"] = round(result["tokens_per_second_served"] / result["tokens_per_second_in_process"], 6)
    return Outcome(result=result, series=dict(steps_ms))


def _ask_here(bench: Bench, plan: ServedPlan) -> float:
    """Returns tokens per second."""
    requests = [bench.prompts.request(plan.input_len, plan.output_len) for _ in range(plan.num_requests)]
    answers, _ = asyncio.run(ask_with_users(bench.engine, requests, plan.num_users))
    start = min(answer.submitted for answer in answers)
    end = max(answer.arrivals[-1] for answer in answers)
    return plan.num_requests * plan.output_len / (end - start)


def _ask_over_http(base_url: str, plan: ServedPlan, seed: int) -> float:
    """Let ``pagedllm bench serve`` ask, in a process of its own; returns tokens per second."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        options = {
            "--base-url": base_url,
            "--num-prompts": plan.num_requests,
            "--max-concurrency": plan.num_users,
            "--input-len": plan.input_len,
            "--output-len": plan.output_len,
            "--seed": seed,
            "--json": file,
        }
        arguments = [str(part) for option in options.items() for part in option]
        command = [sys.executable, "-c", _CLIENT, "bench", "serve", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise EngineError(f"the users over HTTP failed: {done.stderr.strip() or done.stdout.strip()}")
        return float(json.loads(file.read_text())["output_tokens_per_second"])


def draw(figure: Any, outcome: Outcome) -> None:
    """How the steps' durations are spread, either way."""
    draw_spread(figure, outcome.series, "The same steps, with users in this process and over HTTP")


SCENARIO = Scenario(
    name="served",
    plan=ServedPlan(),
    run=run,
    draw=draw,
    own_options=("max_num_seqs",),
    scaled={"num_requests": 16},
)
