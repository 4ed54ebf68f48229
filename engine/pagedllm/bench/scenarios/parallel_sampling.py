"""What several answers to one prompt take of the KV pool, sharing the prompt's blocks and not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...api import CacheHints, GenerateRequest
from ...errors import ConfigError
from .setting import Bench, Outcome, Scenario, Setting, make_request

__all__ = ["SCENARIO", "ParallelSamplingPlan", "minimum_blocks"]


@dataclass(frozen=True, kw_only=True)
class ParallelSamplingPlan:
    """One prompt, answered several times.

    Args:
        input_len: Tokens of the prompt; no multiple of the block size, so that its last block has to be copied.
        output_len: Tokens of each answer.
        nums_choices: How many answers, one measurement for each number.
    """

    input_len: int = 250
    output_len: int = 60
    nums_choices: tuple[int, ...] = (1, 2, 4, 8)


def run(setting: Setting, plan: ParallelSamplingPlan) -> Outcome:
    """Count the blocks in use at the peak; the result is of the largest number of answers, the series of all.

    Without sharing, each answer is a request with a salt of its own, which keeps the cache from sharing.

    Raises:
        ConfigError: ``max_num_seqs`` does not let all answers run at once.
    """
    most = max(plan.nums_choices)
    series: dict[str, list[Any]] = {}
    with setting.engine() as bench:
        if bench.info.max_num_seqs < most:
            raise ConfigError.for_value("max_num_seqs", bench.info.max_num_seqs, f"must be at least {most}")
        for num_choices in plan.nums_choices:
            for name, value in _measure(bench, plan, num_choices, setting.seed).items():
                series.setdefault(name, []).append(value)
    result = {name: values[plan.nums_choices.index(most)] for name, values in series.items()}
    result["block_bytes"] = bench.info.kv_bytes_per_token * bench.info.block_size
    return Outcome(result=result, series=series)


def _measure(bench: Bench, plan: ParallelSamplingPlan, num_choices: int, seed: int) -> dict[str, int]:
    prompt, info = bench.prompts.draw(plan.input_len), bench.info
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": seed}
    together = [make_request(prompt, plan.output_len, n=num_choices, **sampling)]
    apart = [
        make_request(prompt, plan.output_len, hints=CacheHints(salt=f"answer-{index}"), **sampling)
        for index in range(num_choices)
    ]
    # The token sampled last is not computed, so it takes no slot.
    num_new_tokens = plan.output_len - 1
    shared, unshared = _peak_blocks(bench, together), _peak_blocks(bench, apart)
    minimum = minimum_blocks(plan.input_len, num_new_tokens, num_choices, info.block_size)
    block_bytes = info.kv_bytes_per_token * info.block_size
    return {
        "n": num_choices,
        "children": num_choices - 1,
        "blocks_shared": shared,
        "blocks_unshared": unshared,
        "blocks_minimum": minimum,
        "prompt_blocks": plan.input_len // info.block_size,
        "bytes_shared": shared * block_bytes,
        "bytes_unshared": unshared * block_bytes,
    }


def minimum_blocks(num_prompt_tokens: int, num_new_tokens: int, num_choices: int, block_size: int) -> int:
    """Blocks of one answer with its prompt, and for each further one the blocks of its own tokens alone.

    Sharing takes at most one block more for each further answer, because its tokens start in a copy of the prompt's
    last, partial block.
    """
    return -(-(num_prompt_tokens + num_new_tokens) // block_size) + (num_choices - 1) * -(-num_new_tokens // block_size)


def _peak_blocks(bench: Bench, requests: Sequence[GenerateRequest]) -> int:
    """Most blocks that running sequences held after a step; blocks that are only cached do not count."""
    bench.engine.reset_prefix_cache()
    bench.take_steps()
    bench.ask_together(requests)
    return round(max(step.kv_cache_usage for step in bench.take_steps()) * bench.info.num_blocks)


def draw(figure: Any, outcome: Outcome) -> None:
    """Blocks by number of answers."""
    axes = figure.subplots()
    series = outcome.series
    places = np.arange(len(series["n"]))
    bars = (
        ("blocks_unshared", "without sharing", "tab:red"),
        ("blocks_shared", "prompt's blocks shared", "tab:blue"),
        ("blocks_minimum", "least possible", "tab:gray"),
    )
    for offset, (name, label, color) in zip((-0.27, 0.0, 0.27), bars, strict=True):
        drawn = axes.bar(places + offset, series[name], width=0.25, label=label, color=color)
        axes.bar_label(drawn, padding=2)
    axes.set_xticks(places, [str(count) for count in series["n"]])
    axes.set(xlabel="answers to one prompt (n)", ylabel="KV blocks in use at the peak")
    axes.set_title(f"Parallel sampling, {outcome.result['block_bytes'] / 1024:.0f} KiB a block")
    axes.legend(loc="upper left")


SCENARIO = Scenario(name="parallel-sampling", plan=ParallelSamplingPlan(), run=run, draw=draw)
