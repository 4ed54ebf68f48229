"""The figures of a benchmark, computed from what was timed; the commands' help defines them for users."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..core import StepRecord
from .timing import BatchRun, Measurement

__all__ = ["decode_rate", "figures", "only_decodes", "spread", "table", "trace_lines"]

_ROUND = 6
_HEAD = (
    *("prompts", "in", "out", "prefill tok/s", "decode tok/s", "output tok/s"),
    *("TTFT p50 ms", "ITL p50 ms", "ITL p99 ms", "time s"),
)


def figures(measurement: Measurement) -> dict[str, Any]:
    """The figures of a workload, ready for JSON; None where nothing was there to measure (``output_len`` 1)."""
    workload, prefills, runs = measurement.workload, measurement.prefills, measurement.runs
    prefill_s = sum(batch.duration_s for batch in prefills)
    duration_s = sum(batch.duration_s for batch in runs)
    num_prefill_tokens = workload.num_prompts * workload.input_len * len(prefills)
    return {
        **dataclasses.asdict(workload),
        "num_iters": len(runs),
        "num_iters_warmup": len(measurement.warmups),
        "prefill_tokens_per_second": _rounded(num_prefill_tokens / prefill_s),
        "decode_tokens_per_second": decode_rate([batch.steps for batch in runs]),
        "output_tokens_per_second": _rounded(sum(batch.num_output_tokens for batch in runs) / duration_s),
        "ttft_ms": spread([1000 * value for batch in runs for value in batch.ttft_s]),
        "itl_ms": spread([1000 * value for batch in runs for value in batch.gaps_s]),
        "latency_ms": spread([1000 * batch.duration_s for batch in runs]),
        "duration_s": _rounded(duration_s),
        "prefill_s": _rounded(prefill_s),
        "num_preempted": sum(step.num_preempted for batch in runs for step in batch.steps),
        "num_cached_tokens": sum(batch.num_cached_tokens for batch in (*prefills, *runs)),
    }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles (linear interpolation); None of no values."""
    if not values:
        return None
    p50, p95, p99 = np.percentile(values, [50, 95, 99])
    return {"mean": _rounded(np.mean(values)), "p50": _rounded(p50), "p95": _rounded(p95), "p99": _rounded(p99)}


def decode_rate(batches: Sequence[Sequence[StepRecord]]) -> float | None:
    """Tokens per second over the steps that only decode; None if there are none."""
    num_tokens, seconds = 0, 0.0
    for steps in batches:
        for before, step in itertools.pairwise(steps):
            if only_decodes(step):
                num_tokens += step.num_tokens
                # From end to end, so that what the engine does between two steps counts too.
                seconds += step.time_s + step.duration_s - (before.time_s + before.duration_s)
    return _rounded(num_tokens / seconds) if num_tokens else None


def trace_lines(measurement: Measurement) -> Iterator[dict[str, Any]]:
    """One entry for each step, in order, with what the step belongs to."""
    yield from _trace(measurement, "warmup", measurement.warmups)
    for prefill, run in zip(measurement.prefills, measurement.runs, strict=True):
        yield from _trace(measurement, "prefill", [prefill])
        yield from _trace(measurement, "run", [run])


def table(results: Sequence[dict[str, Any]]) -> str:
    """The main figures for reading: a line for each result."""
    rows = [_HEAD, *(_row(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def only_decodes(step: StepRecord) -> bool:
    return step.num_admitted == 0 and step.num_tokens == step.num_running + step.num_retired


def _trace(measurement: Measurement, phase: str, batches: Sequence[BatchRun]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        for step in batch.steps:
            yield {"num_prompts": measurement.workload.num_prompts, "phase": phase, **dataclasses.asdict(step)}


def _row(result: dict[str, Any]) -> tuple[str, ...]:
    itl = result["itl_ms"] or {}
    values = [result[name] for name in ("prefill_tokens_per_second", "decode_tokens_per_second")]
    values += [result["output_tokens_per_second"], result["ttft_ms"]["p50"], itl.get("p50"), itl.get("p99")]
    counts = [str(result[name]) for name in ("num_prompts", "input_len", "output_len")]
    return (*counts, *("-" if value is None else f"{value:.1f}" for value in values), f"{result['duration_s']:.2f}")


def _rounded(value: Any) -> float:
    return round(float(value), _ROUND)
