"""Continuous batching against two kinds of static batches: same prompts, same lengths, same seats, same engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .setting import Bench, Outcome, Scenario, Setting, make_request

__all__ = ["SCENARIO", "BatchingPlan"]

_WAYS = ("padded", "dropped", "continuous")


@dataclass(frozen=True, kw_only=True)
class BatchingPlan:
    """Short and long answers mixed, all wanted at once.

    Every ``long_every``-th request is long, so that each static batch gets its share; were they drawn at random, some
    batches would have none, and others more.

    Args:
        num_requests: In all.
        num_seats: Sequences at a time, and rows of a static batch.
        input_len: Tokens of each prompt.
        short_len, long_len: Tokens of an answer.
        long_every: How many requests to one long one.
    """

    num_requests: int = 128
    num_seats: int = 8
    input_len: int = 12
    short_len: int = 20
    long_len: int = 500
    long_every: int = 4

    @property
    def output_lens(self) -> list[int]:
        """Tokens wanted of each answer."""
        return [
            self.long_len if index % self.long_every == self.long_every - 1 else self.short_len
            for index in range(self.num_requests)
        ]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One way to serve all requests.

    Args:
        duration_s: From the first one sent to the end.
        num_steps: Of the engine.
        latencies_s: Of each, from the beginning to its last wanted token.
        returned_s: Of each, from the beginning to when its batch was done; continuous: as ``latencies_s``.
        rows: Tokens computed in each step, in order.
    """

    duration_s: float
    num_steps: int
    latencies_s: list[float]
    returned_s: list[float]
    rows: list[int]


def run(setting: Setting, plan: BatchingPlan) -> Outcome:
    """Serve the requests three times: in padded batches, in batches whose finished rows are dropped, continuously.

    A padded batch computes every row until its longest one ends; what a row computes beyond its own end is not counted
    as output. With finished rows dropped, the rows that go on have the engine to themselves, but nobody new comes in
    until all have ended.
    """
    with setting.engine(max_num_seqs=plan.num_seats) as bench:
        prompts = [bench.prompts.draw(plan.input_len) for _ in range(plan.num_requests)]
        padded = _measure(bench, lambda start: _static(bench, plan, prompts, start, pads=True))
        dropped = _measure(bench, lambda start: _static(bench, plan, prompts, start, pads=False))
        continuous = _measure(bench, lambda start: _continuous(bench, plan, prompts, start))
    runs = dict(zip(_WAYS, (padded, dropped, continuous), strict=True))
    num_tokens = sum(plan.output_lens)
    latency = {way: float(np.mean(found.latencies_s)) for way, found in runs.items()}
    result: dict[str, Any] = {
        "throughput_ratio_padded": padded.duration_s / continuous.duration_s,
        "throughput_ratio_dropped": dropped.duration_s / continuous.duration_s,
        "step_ratio": padded.num_steps / continuous.num_steps,
        # To the last wanted token, as if a padded batch could hand a row's answer out before it ends.
        "latency_ratio": latency["continuous"] / latency["padded"],
        "latency_ratio_returned": latency["continuous"] / float(np.mean(padded.returned_s)),
        "latency_ratio_dropped": latency["continuous"] / latency["dropped"],
        "num_tokens": num_tokens,
    }
    for way, found in runs.items():
        result |= {
            f"{way}_tokens_per_second": num_tokens / found.duration_s,
            f"{way}_steps": found.num_steps,
            f"{way}_mean_latency_s": latency[way],
        }
    result = {name: round(value, 6) for name, value in result.items()}
    return Outcome(result=result, series={f"{way}_rows": found.rows for way, found in runs.items()})


def _measure(bench: Bench, serve: Callable[[float], tuple[list[float], list[float]]]) -> _Run:
    bench.engine.reset_prefix_cache()
    bench.take_steps()
    start = time.monotonic()
    latencies, returned = serve(start)
    duration = time.monotonic() - start
    steps = bench.take_steps()
    return _Run(
        duration_s=duration,
        num_steps=len(steps),
        latencies_s=latencies,
        returned_s=returned,
        rows=[step.num_running + step.num_retired for step in steps],
    )


def _static(
    bench: Bench, plan: BatchingPlan, prompts: list[tuple[int, ...]], start: float, *, pads: bool
) -> tuple[list[float], list[float]]:
    latencies, returned = [], []
    wanted_lens = plan.output_lens
    for first in range(0, plan.num_requests, plan.num_seats):
        wanted = wanted_lens[first : first + plan.num_seats]
        computed = [max(wanted)] * len(wanted) if pads else wanted
        batch = prompts[first : first + plan.num_seats]
        answers = bench.ask_together([make_request(*item) for item in zip(batch, computed, strict=True)])
        end = time.monotonic()
        latencies += [answer.arrivals[count - 1] - start for answer, count in zip(answers, wanted, strict=True)]
        returned += [end - start] * len(batch)
    return latencies, returned


def _continuous(
    bench: Bench, plan: BatchingPlan, prompts: list[tuple[int, ...]], start: float
) -> tuple[list[float], list[float]]:
    answers = bench.ask_together([make_request(*item) for item in zip(prompts, plan.output_lens, strict=True)])
    latencies = [answer.arrivals[-1] - start for answer in answers]
    return latencies, latencies


def draw(figure: Any, outcome: Outcome) -> None:
    """Rows in use over the steps, and throughput and latency beside each other."""
    (over_steps, bars) = figure.subplots(1, 2, width_ratios=(3, 2))
    result, colors = outcome.result, ("tab:red", "tab:orange", "tab:blue")
    labels = ("static, padded", "static, finished dropped", "continuous")
    for way, label, color in zip(_WAYS, labels, colors, strict=True):
        rows = outcome.series[f"{way}_rows"]
        over_steps.plot(rows, color=color, label=f"{label}: {len(rows)} steps", linewidth=1.2)
    top = max(max(outcome.series[f"{way}_rows"]) for way in _WAYS)
    over_steps.set(
        xlabel="step of the engine", ylabel="rows computed", ylim=(0, 1.4 * top), title="Rows over the steps"
    )
    over_steps.legend(loc="upper right")  # above the lines
    places = np.arange(len(_WAYS))
    drawn = bars.bar(places, [result[f"{way}_tokens_per_second"] for way in _WAYS], color=colors)
    latencies = [result[f"{way}_mean_latency_s"] for way in _WAYS]
    bars.bar_label(drawn, [f"{latency:.1f} s\nlatency" for latency in latencies], padding=2)
    bars.set_xticks(places, ["padded", "dropped", "continuous"])
    bars.set(ylabel="wanted tokens per second", title="Throughput and mean latency")
    bars.margins(y=0.2)


SCENARIO = Scenario(
    name="batching",
    plan=BatchingPlan(),
    run=run,
    draw=draw,
    own_options=("max_num_seqs",),
    scaled={"num_requests": 16},
)
