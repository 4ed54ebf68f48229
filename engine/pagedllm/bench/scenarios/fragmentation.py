"""How much of the allocated KV memory holds nothing, with blocks on demand and with a reservation for each sequence."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...api import GenerateRequest
from ...errors import InvalidRequestError
from ..load import ask_together
from .setting import Bench, Outcome, Scenario, Setting

__all__ = ["SCENARIO", "FragmentationPlan"]

_MIN_SAMPLES = 10
# What a reservation would take where the user does not say; the model's own limit would flatter paging.
_DEFAULT_MAX_MODEL_LEN = 2048


@dataclass(frozen=True, kw_only=True)
class FragmentationPlan:
    """A long random mixed load, all sent at once, so that as many run as may.

    Args:
        num_rounds: Requests for each seat.
        min_input_len, max_input_len: Tokens of a prompt, drawn evenly.
        min_output_len, max_output_len: Tokens generated, likewise.
        sample_every_s: Seconds between two looks at the engine.
    """

    num_rounds: int = 4
    min_input_len: int = 50
    max_input_len: int = 500
    min_output_len: int = 20
    max_output_len: int = 200
    sample_every_s: float = 0.02


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """The running sequences between two steps; tokens and token slots."""

    num_running: int
    num_slots: int
    num_unused: int

    @property
    def num_tokens(self) -> int:
        return self.num_slots - self.num_unused


def run(setting: Setting, plan: FragmentationPlan) -> Outcome:
    """Sample the engine's figures while requests wait, after as many have ended as may run at once.

    Before, all that run are young; later, when nobody waits, seats stay empty. Prompts share nothing, so every
    referenced block belongs to one sequence.

    Raises:
        InvalidRequestError: Too few requests to ever be in that state for a while.
    """
    max_model_len = setting.config.max_model_len or _DEFAULT_MAX_MODEL_LEN
    with setting.engine(max_model_len=max_model_len) as bench:
        rng = bench.prompts.rng
        requests = [
            bench.prompts.request(
                int(rng.integers(plan.min_input_len, plan.max_input_len + 1)),
                int(rng.integers(plan.min_output_len, plan.max_output_len + 1)),
            )
            for _ in range(plan.num_rounds * bench.info.max_num_seqs)
        ]
        samples = asyncio.run(_sample_while_running(bench, requests, plan.sample_every_s))
        stats = bench.engine.stats()
    if len(samples) < _MIN_SAMPLES:
        raise InvalidRequestError.for_value(
            "num_rounds", plan.num_rounds, f"gave {len(samples)} samples of a full engine; send more requests"
        )
    paged = [sample.num_unused / sample.num_slots for sample in samples]
    reserved = [1 - sample.num_tokens / (sample.num_running * max_model_len) for sample in samples]
    mean_tokens = float(np.mean([sample.num_tokens / sample.num_running for sample in samples]))
    tenth = max(len(samples) // 10, 1)
    result: dict[str, Any] = {
        "unused_share_paged": _rounded(np.mean(paged)),
        "unused_share_reserved": _rounded(np.mean(reserved)),
        "mean_tokens": _rounded(mean_tokens),
        "drift": _rounded(np.mean(paged[-tenth:]) - np.mean(paged[:tenth])),
        "half_block_share": _rounded(bench.info.block_size / 2 / mean_tokens),
        "block_size": bench.info.block_size,
        "max_model_len": max_model_len,
        "mean_running": _rounded(np.mean([sample.num_running for sample in samples])),
        "num_samples": len(samples),
        "num_preemptions": stats.num_preemptions,
    }
    return Outcome(result=result, series={"unused_share_paged": paged, "unused_share_reserved": reserved})


async def _sample_while_running(bench: Bench, requests: list[GenerateRequest], every_s: float) -> list[_Sample]:
    answers = asyncio.ensure_future(ask_together(bench.engine, requests))
    samples = []
    while not answers.done():
        await asyncio.wait([answers], timeout=every_s)
        stats = await bench.engine.astats()
        num_ended = len(requests) - stats.num_running - stats.num_waiting
        if stats.num_waiting and stats.num_running and num_ended >= stats.num_running_peak:
            num_slots = stats.num_referenced_blocks * bench.info.block_size
            samples.append(
                _Sample(num_running=stats.num_running, num_slots=num_slots, num_unused=stats.num_unused_slots)
            )
    await answers
    return samples


def draw(figure: Any, outcome: Outcome) -> None:
    """Both shares over the course of the load."""
    axes = figure.subplots()
    result, series = outcome.result, outcome.series
    share_done = np.linspace(0, 100, len(series["unused_share_paged"]))
    reserved = f"reserving {result['max_model_len']} tokens for each: mean {result['unused_share_reserved']:.1%}"
    paged = f"blocks of {result['block_size']} tokens on demand: mean {result['unused_share_paged']:.1%}"
    axes.plot(share_done, np.multiply(series["unused_share_reserved"], 100), color="tab:red", label=reserved)
    axes.plot(share_done, np.multiply(series["unused_share_paged"], 100), color="tab:blue", label=paged)
    half = 100 * result["half_block_share"]
    axes.axhline(half, color="black", linestyle=":", label=f"half a block of each sequence: {half:.1f} %")
    axes.set(xlabel="course of the load (%)", ylabel="KV slots that hold nothing (%)", ylim=(0, 100), xlim=(0, 100))
    axes.set_title(f"Unused KV memory, {result['mean_tokens']:.0f} tokens resident per sequence")
    axes.legend(loc="center right")


def _rounded(value: Any) -> float:
    return round(float(value), 6)


SCENARIO = Scenario(name="fragmentation", plan=FragmentationPlan(), run=run, draw=draw, scaled={"num_rounds": 3})
