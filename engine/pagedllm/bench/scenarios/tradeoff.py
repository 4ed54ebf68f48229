"""The largest batch is not the best one: throughput and waiting times over ``max_num_seqs``."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import InvalidRequestError
from ..load import ask_with_users
from .setting import Bench, Outcome, Scenario, Setting, percentiles

__all__ = ["SCENARIO", "TradeoffPlan"]


@dataclass(frozen=True, kw_only=True)
class TradeoffPlan:
    """As many users as seats, each with a question as soon as it has the answer to its last.

    Args:
        nums_seqs: Values of ``max_num_seqs``.
        num_rounds: Questions of each user.
        input_len: Tokens of a prompt.
        min_output_len, max_output_len: Tokens generated, drawn evenly, so that answers do not end together.
    """

    nums_seqs: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    num_rounds: int = 4
    input_len: int = 32
    min_output_len: int = 32
    max_output_len: int = 96


def run(setting: Setting, plan: TradeoffPlan) -> Outcome:
    """Measure each point on an engine of its own.

    Measured: tokens that users got by time, from when every user has a first token to when the first one has no
    question left. Predicted: seats by the mean duration of the engine's steps in that time.
    """
    curve = []
    for num_seqs in plan.nums_seqs:
        with setting.engine(max_num_seqs=num_seqs) as bench:
            curve.append(_measure(bench, plan, num_seqs))
    best = max(curve, key=lambda point: point["tokens_per_second"])
    # The smallest batch that gives nine tenths of the best throughput.
    knee = next(point for point in curve if point["tokens_per_second"] >= 0.9 * best["tokens_per_second"])
    result: dict[str, Any] = {
        "curve": curve,
        "max_error": max(abs(point["error"]) for point in curve),
        "best_max_num_seqs": best["max_num_seqs"],
        "knee_max_num_seqs": knee["max_num_seqs"],
        "knee_throughput_share": round(knee["tokens_per_second"] / best["tokens_per_second"], 6),
        "knee_itl_p95_share": round(knee["itl_p95_ms"] / best["itl_p95_ms"], 6),
    }
    return Outcome(result=result)


def _measure(bench: Bench, plan: TradeoffPlan, num_seqs: int) -> dict[str, Any]:
    rng = bench.prompts.rng
    requests = [
        bench.prompts.request(plan.input_len, int(rng.integers(plan.min_output_len, plan.max_output_len + 1)))
        for _ in range(num_seqs * plan.num_rounds)
    ]
    bench.take_steps()
    answers, end = asyncio.run(ask_with_users(bench.engine, requests, num_seqs))
    start = max(answer.arrivals[0] for answer in answers[:num_seqs])
    num_tokens = sum(start < arrival <= end for answer in answers for arrival in answer.arrivals)
    durations = [step.duration_s for step in bench.take_steps() if start < step.time_s + step.duration_s <= end]
    if not durations or not num_tokens:
        raise InvalidRequestError.for_value("num_rounds", plan.num_rounds, "leaves no time with all seats taken")
    step_s = float(np.mean(durations))
    measured, predicted = num_tokens / (end - start), num_seqs / step_s
    return {
        "max_num_seqs": num_seqs,
        "tokens_per_second": round(measured, 3),
        "predicted_tokens_per_second": round(predicted, 3),
        "error": round(predicted / measured - 1, 6),
        "step_ms": round(1000 * step_s, 3),
        "num_tokens": num_tokens,
        **percentiles("itl", [gap for answer in answers for gap in answer.gaps_s]),
        **percentiles("e2e", [answer.duration_s for answer in answers]),
    }


def draw(figure: Any, outcome: Outcome) -> None:
    """Throughput against time between tokens and per answer, a point for each ``max_num_seqs``."""
    panels = figure.subplots(1, 2, sharey=True)
    curve = outcome.result["curve"]
    measured = [point["tokens_per_second"] for point in curve]
    names = (("itl", "time between two tokens (ms)"), ("e2e", "time of a whole answer (ms)"))
    for axes, (name, label) in zip(panels, names, strict=True):
        for share, color in ((50, "tab:blue"), (95, "tab:orange"), (99, "tab:red")):
            times = [point[f"{name}_p{share}_ms"] for point in curve]
            axes.plot(times, measured, marker="o", color=color, label=f"P{share}")
        for point in curve:
            place = (point[f"{name}_p50_ms"], point["tokens_per_second"])
            axes.annotate(point["max_num_seqs"], place, xytext=(-4, 6), textcoords="offset points", ha="right")
        axes.set_xscale("log")
        axes.set(xlabel=label)
        axes.grid(alpha=0.3, which="both")
    medians = [point["itl_p50_ms"] for point in curve]
    predicted = [point["predicted_tokens_per_second"] for point in curve]
    panels[0].plot(medians, predicted, "k+", markersize=10, label="batch ÷ step time")
    panels[0].set(ylabel="tokens per second", ylim=(0, None))
    panels[0].margins(x=0.15)
    panels[0].legend(loc="lower right")
    figure.suptitle("Throughput against waiting; the numbers are max_num_seqs")


SCENARIO = Scenario(
    name="tradeoff",
    plan=TradeoffPlan(),
    run=run,
    draw=draw,
    own_options=("max_num_seqs",),
    scaled={"num_rounds": 3},
)
