"""The figures of a serving benchmark; the command's help defines them for users."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError
from .serving import Answer, ServingRun

__all__ = ["GOALS", "parse_goals", "plot_run", "serving_figures", "serving_table"]

GOALS = ("ttft", "tpot", "itl", "e2el")
_ROUND = 6
_SPREADS = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
_MAX_ERRORS_SHOWN = 5


def parse_goals(texts: Sequence[str]) -> dict[str, float]:
    """``["ttft:500", "tpot:50"]`` as milliseconds by name; one text may hold several, with spaces or commas.

    Raises:
        ConfigError: One is not of that form.
    """
    goals: dict[str, float] = {}
    for text in texts:
        for part in text.replace(",", " ").split():
            name, _, value = part.partition(":")
            try:
                limit = float(value)
            except ValueError:
                limit = -1.0
            if name not in GOALS or not limit > 0:
                raise ConfigError.for_value("goodput", part, f"must be NAME:MILLISECONDS of {', '.join(GOALS)}")
            goals[name] = limit
    return goals


def serving_figures(run: ServingRun, goals: Mapping[str, float]) -> dict[str, Any]:
    """The figures of a run, ready for JSON; a spread of nothing is None. Times are of whole answers only."""
    answers = [answer for answer in run.answers if not answer.error]
    num_tokens = sum(_num_tokens(answer) for answer in answers)
    num_prompt_tokens = sum(answer.num_prompt_tokens for answer in answers)
    figures: dict[str, Any] = {
        "num_completed": len(answers),
        "num_failed": len(run.answers) - len(answers),
        "errors": _errors(run.answers),
        "duration_s": _rounded(run.duration_s),
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": num_tokens,
        "num_cached_tokens": sum(answer.num_cached_tokens for answer in answers),
        "requests_per_second": _rounded(len(answers) / run.duration_s),
        "output_tokens_per_second": _rounded(num_tokens / run.duration_s),
        "total_tokens_per_second": _rounded((num_prompt_tokens + num_tokens) / run.duration_s),
        "ttft_ms": _spread([_ttft_ms(answer) for answer in answers]),
        "tpot_ms": _spread([value for answer in answers for value in _tpot_ms(answer)]),
        "itl_ms": _spread([value for answer in answers for value in _itl_ms(answer)]),
        "e2e_ms": _spread([_e2e_ms(answer) for answer in answers]),
    }
    if goals:
        num_good = sum(_meets(answer, goals) for answer in answers)
        figures["goals_ms"] = dict(goals)
        figures["num_good"] = num_good
        figures["goodput_requests_per_second"] = _rounded(num_good / run.duration_s)
    return figures


def serving_table(figures: Mapping[str, Any]) -> str:
    """The figures for reading."""
    lines = [
        f"{figures['num_completed']} answers, {figures['num_failed']} failed, in {figures['duration_s']:.2f} s",
        f"{figures['requests_per_second']:.2f} requests/s, {figures['output_tokens_per_second']:.1f} output tokens/s, "
        f"{figures['total_tokens_per_second']:.1f} tokens/s",
        f"{figures['num_prompt_tokens']} prompt tokens, {figures['num_cached_tokens']} of them cached; "
        f"{figures['num_output_tokens']} output tokens",
    ]
    if "num_good" in figures:
        lines.append(f"{figures['goodput_requests_per_second']:.2f} requests/s met all goals")
    rows: list[tuple[str, ...]] = [("ms", "mean", "median", "p95", "p99")]
    for name in _SPREADS:
        spread = figures[name]
        cells = (f"{value:.1f}" for value in spread.values()) if spread else ("-",) * 4
        rows.append((name.removesuffix("_ms").upper(), *cells))
    lines += ["  ".join(cell.rjust(9) for cell in row) for row in rows]
    return "\n".join([*lines, *(f"{count} x {error}" for error, count in figures["errors"].items())])


def plot_run(run: ServingRun, path: str) -> None:
    """Draw when requests ran, and how their times are distributed, into a file of the kind that its name says.

    Raises:
        ConfigError: matplotlib is not installed, or cannot write such a file.
    """
    try:
        # Lazy door: optional, and slow to import.
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError("plot: needs matplotlib: pip install 'langchain-pagedllm[bench]'") from error
    answers = [answer for answer in run.answers if not answer.error]
    start = min((answer.sent for answer in run.answers), default=0.0)
    figure = Figure(figsize=(12, 4), layout="constrained")
    timeline, *rest = figure.subplots(1, 4)
    for row, answer in enumerate(answers):
        first = answer.arrivals[0]
        timeline.plot([answer.sent - start, first - start], [row, row], color="tab:orange", linewidth=1)
        timeline.plot([first - start, answer.ended - start], [row, row], color="tab:blue", linewidth=1)
    timeline.set(title="requests: waiting, then streaming", xlabel="s", ylabel="in order of arrival")
    series = (
        ("time to first token", [_ttft_ms(answer) for answer in answers]),
        ("between pieces", [value for answer in answers for value in _itl_ms(answer)]),
        ("end to end", [_e2e_ms(answer) for answer in answers]),
    )
    for axes, (title, values) in zip(rest, series, strict=True):
        if values:
            axes.ecdf(values)
        axes.set(title=title, xlabel="ms", ylabel="share")
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"plot: cannot write {path}: {error}") from error


def _ttft_ms(answer: Answer) -> float:
    return 1000 * (answer.arrivals[0] - answer.sent)


def _e2e_ms(answer: Answer) -> float:
    # To the last token: what a server says after it is not waited for by anybody.
    return 1000 * (answer.arrivals[-1] - answer.sent)


def _itl_ms(answer: Answer) -> list[float]:
    return [1000 * (after - before) for before, after in itertools.pairwise(answer.arrivals)]


def _tpot_ms(answer: Answer) -> list[float]:
    """One value, or none for an answer of a single token."""
    num_further = _num_tokens(answer) - 1
    return [(_e2e_ms(answer) - _ttft_ms(answer)) / num_further] if num_further > 0 else []


def _num_tokens(answer: Answer) -> int:
    # A server that sends no usage: a piece is a token, as far as anybody can tell.
    return answer.num_output_tokens or len(answer.arrivals)


def _meets(answer: Answer, goals: Mapping[str, float]) -> bool:
    values = {
        "ttft": [_ttft_ms(answer)],
        "tpot": _tpot_ms(answer),
        "itl": _itl_ms(answer),
        "e2el": [_e2e_ms(answer)],
    }
    return all(value <= limit for name, limit in goals.items() for value in values[name])


def _errors(answers: Sequence[Answer]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for answer in answers:
        if answer.error:
            counts[answer.error] = counts.get(answer.error, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1])[:_MAX_ERRORS_SHOWN])


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    median, p95, p99 = np.percentile(values, [50, 95, 99])
    return {"mean": _rounded(np.mean(values)), "median": _rounded(median), "p95": _rounded(p95), "p99": _rounded(p99)}


def _rounded(value: Any) -> float:
    return round(float(value), _ROUND)
