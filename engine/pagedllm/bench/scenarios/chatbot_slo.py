"""A chatbot that is to answer smoothly: three options, changed one after the other, and what each does to P95."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..load import ask_with_users
from .setting import Bench, Outcome, Scenario, Setting, percentiles

__all__ = ["SCENARIO", "ChatbotPlan"]


@dataclass(frozen=True, kw_only=True)
class ChatbotPlan:
    """Users who ask again as soon as they have an answer: more of them than the machine serves well.

    Args:
        num_users: At a time.
        num_rounds: Questions of each.
        system_len: Tokens of a prompt that are the same for all.
        input_len: Tokens of a prompt, those included.
        output_len: Tokens of an answer.
        target_ms: The P95 of the time between two tokens is to be at most this.
        num_seats: ``max_num_seqs`` before.
        num_seats_after: And after.
        max_model_len_after: The longest chat that the bot allows.
    """

    num_users: int = 32
    num_rounds: int = 3
    system_len: int = 32
    input_len: int = 50
    output_len: int = 150
    target_ms: float = 30.0
    num_seats: int = 64
    num_seats_after: int = 12
    max_model_len_after: int = 256


def run(setting: Setting, plan: ChatbotPlan) -> Outcome:
    """Serve the same users four times; ``before`` and ``after`` are the P95 of the time between two tokens, in ms."""
    stages: dict[str, dict[str, Any]] = {
        "before": {"max_num_seqs": plan.num_seats, "enable_prefix_caching": False},
        "max_num_seqs": {"max_num_seqs": plan.num_seats_after, "enable_prefix_caching": False},
        "prefix caching": {"max_num_seqs": plan.num_seats_after},
        "max_model_len": {"max_num_seqs": plan.num_seats_after, "max_model_len": plan.max_model_len_after},
    }
    series: dict[str, list[Any]] = {"stage": list(stages)}
    for changes in stages.values():
        with setting.engine(**changes) as bench:
            for name, value in _measure(bench, plan).items():
                series.setdefault(name, []).append(value)
    result: dict[str, Any] = {
        "before": series["itl_p95_ms"][0],
        "after": series["itl_p95_ms"][-1],
        "target_ms": plan.target_ms,
        "before_meets_target": series["itl_p95_ms"][0] <= plan.target_ms,
        "after_meets_target": series["itl_p95_ms"][-1] <= plan.target_ms,
    }
    for name in ("e2e_p50_ms", "e2e_p95_ms", "ttft_p95_ms", "tokens_per_second", "kv_pool_bytes"):
        result |= {f"before_{name}": series[name][0], f"after_{name}": series[name][-1]}
    return Outcome(result=result, series=series)


def _measure(bench: Bench, plan: ChatbotPlan) -> dict[str, Any]:
    system = bench.prompts.draw(plan.system_len)
    requests = [
        bench.prompts.request(plan.input_len - plan.system_len, plan.output_len, prefix=system)
        for _ in range(plan.num_users * plan.num_rounds)
    ]
    answers, _ = asyncio.run(ask_with_users(bench.engine, requests, plan.num_users))
    start, end = min(answer.submitted for answer in answers), max(answer.arrivals[-1] for answer in answers)
    return {
        **percentiles("itl", [gap for answer in answers for gap in answer.gaps_s]),
        **percentiles("ttft", [answer.ttft_s for answer in answers]),
        **percentiles("e2e", [answer.duration_s for answer in answers]),
        "tokens_per_second": round(len(requests) * plan.output_len / (end - start), 3),
        "cached_tokens": sum(answer.num_cached_tokens for answer in answers),
        "kv_pool_bytes": bench.info.num_blocks * bench.info.block_size * bench.info.kv_bytes_per_token,
    }


def draw(figure: Any, outcome: Outcome) -> None:
    """Stage by stage: time between tokens with the target, time of an answer, size of the pool."""
    gaps, answers, pool = figure.subplots(1, 3, width_ratios=(3, 3, 2))
    series, result = outcome.series, outcome.result
    labels = [series["stage"][0], *(f"+ {stage}" for stage in series["stage"][1:])]
    places = np.arange(len(labels))
    panels = ((gaps, "itl", "time between two tokens (ms)", 1.0), (answers, "e2e", "time of an answer (s)", 1000.0))
    for axes, name, title, unit in panels:
        for offset, share, color in ((-0.2, 50, "tab:blue"), (0.2, 95, "tab:orange")):
            values = np.divide(series[f"{name}_p{share}_ms"], unit)
            drawn = axes.bar(places + offset, values, width=0.38, color=color, label=f"P{share}")
            axes.bar_label(drawn, fmt="%.0f" if unit == 1.0 else "%.1f", padding=2, fontsize=8)
        axes.set_title(title)
    gaps.axhline(result["target_ms"], color="black", linestyle=":", label=f"target {result['target_ms']:g} ms")
    gaps.legend(fontsize=8)
    drawn = pool.bar(places, np.divide(series["kv_pool_bytes"], 2**20), color="tab:gray")
    pool.bar_label(drawn, fmt="%.0f", padding=2, fontsize=8)
    pool.set_title("KV pool (MiB)")
    for axes in (gaps, answers, pool):
        axes.set_xticks(places, labels, rotation=25, ha="right", fontsize=8)
        axes.margins(y=0.15)


SCENARIO = Scenario(
    name="chatbot-slo",
    plan=ChatbotPlan(),
    run=run,
    draw=draw,
    own_options=("max_num_seqs", "enable_prefix_caching", "max_model_len"),
    scaled={"num_rounds": 1},
)
