"""Steps of equal work, and how long they take: what several scenarios compare."""

from __future__ import annotations

from collections.abc import Sequence as List
from statistics import median
from typing import Any

from ...core import StepRecord
from ...errors import InvalidRequestError

__all__ = ["draw_spread", "full_steps_ms"]

_COLORS = ("tab:blue", "tab:orange", "tab:green")


def full_steps_ms(steps: List[StepRecord], num_sequences: int, output_len: int) -> list[float]:
    """Durations of the steps in which so many sequences compute one token each, and nobody computes anything else.

    Args:
        output_len: What decides whether there are any.

    Raises:
        InvalidRequestError: There is none.
    """
    durations = [1000 * step.duration_s for step in steps if step.num_tokens == step.num_running == num_sequences]
    if not durations:
        raise InvalidRequestError.for_value("output_len", output_len, "leaves no step with all sequences decoding")
    return durations


def draw_spread(figure: Any, series: dict[str, list[float]], title: str) -> None:
    """Draw which share of steps took how long at most, a line for each way to do them."""
    axes = figure.subplots()
    for (way, durations), color in zip(series.items(), _COLORS, strict=False):
        ordered = sorted(durations)
        shares = [(number + 1) / len(ordered) for number in range(len(ordered))]
        label = f"{way.replace('_', ' ')}: median {median(ordered):.3g} ms"
        axes.plot(ordered, shares, label=label, color=color)
    axes.set(xlabel="duration of a step (ms)", ylabel="share of steps", xscale="log", ylim=(0, 1))
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="lower right")
    figure.suptitle(title)
