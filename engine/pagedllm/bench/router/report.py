"""Figures of simulated routing policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .simulation import SimulationResult

__all__ = ["figures", "table"]

_COLUMNS = (
    ("policy", "policy", "{}"),
    ("cached_share", "cached", "{:.1%}"),
    ("ttft_p50_ms", "TTFT p50 ms", "{:.0f}"),
    ("ttft_p90_ms", "p90", "{:.0f}"),
    ("ttft_p99_ms", "p99", "{:.0f}"),
    ("latency_p50_ms", "latency p50 ms", "{:.0f}"),
    ("imbalance", "imbalance", "{:.2f}"),
    ("decision_p50_us", "decision p50 µs", "{:.0f}"),
    ("decision_p99_us", "p99", "{:.0f}"),
    ("num_held_blocks", "blocks cached", "{}"),
)


def figures(result: SimulationResult) -> dict[str, Any]:
    """What one policy achieved.

    ``cached_share`` is of all prompt tokens. ``imbalance`` is the largest of the replicas' running tokens, averaged
    over time, by the mean of all.
    """
    served = result.served
    ttft = np.array([item.ttft_s for item in served]) * 1e3
    latency = np.array([item.total_s for item in served]) * 1e3
    decision = np.array(result.decision_s) * 1e6
    running = np.array(result.running_tokens)
    named: dict[str, Any] = {
        "policy": result.policy,
        "num_requests": len(served),
        "num_held_blocks": result.num_held_blocks,
        "duration_s": round(result.duration_s, 3),
        "cached_share": sum(item.num_cached_tokens for item in served) / sum(item.num_prompt_tokens for item in served),
        "imbalance": float(running.max() / running.mean()),
        "mean_running_tokens": float(running.mean()),
    }
    for name, values in (("ttft_{}_ms", ttft), ("latency_{}_ms", latency), ("decision_{}_us", decision)):
        for percentile in (50, 90, 99):
            named[name.format(f"p{percentile}")] = round(float(np.percentile(values, percentile)), 3)
    return named


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The figures as a Markdown table."""
    lines = ["| " + " | ".join(title for _, title, _ in _COLUMNS) + " |", "|---" + "|---:" * (len(_COLUMNS) - 1) + "|"]
    lines += ["| " + " | ".join(form.format(row[name]) for name, _, form in _COLUMNS) + " |" for row in rows]
    return "\n".join(lines)
