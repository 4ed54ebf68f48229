"""How a benchmark is timed: batches sent through an engine, seen from its consumer and from its steps."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace

import numpy as np

from ..api import Engine, GenerateRequest
from ..core import StepRecord
from .load import ask_together
from .workloads import Workload, random_requests

__all__ = ["BatchRun", "Measurement", "StepRecorder", "measure"]

# Enough to have run prompts and single tokens in all batch sizes once.
_WARMUP_OUTPUT_LEN = 8


class StepRecorder:
    """Collects the steps of an engine; ``record`` is what the engine calls."""

    def __init__(self) -> None:
        self._steps: list[StepRecord] = []

    def record(self, step: StepRecord) -> None:
        self._steps.append(step)

    def take(self) -> list[StepRecord]:
        """The steps since the last call. Between batches only: the engine's thread writes while it works."""
        steps, self._steps = self._steps, []
        return steps


@dataclass(frozen=True, kw_only=True)
class BatchRun:
    """One batch from its first submission to its last token.

    Args:
        ttft_s: From the submission of each request to its first token at the consumer.
        gaps_s: Between each token and the one before it of the same request, at the consumer; over all requests.
        num_output_tokens: Over all requests.
        num_cached_tokens: Prompt tokens found in the prefix cache: 0, unless the workload is wrong.
        steps: What the engine did meanwhile.
    """

    duration_s: float
    ttft_s: list[float]
    gaps_s: list[float]
    num_output_tokens: int
    num_cached_tokens: int
    steps: list[StepRecord]


@dataclass(kw_only=True)
class Measurement:
    """All batches of one workload: those that warm up, those that only prefill, and those that count."""

    workload: Workload
    warmups: list[BatchRun] = field(default_factory=list)
    prefills: list[BatchRun] = field(default_factory=list)
    runs: list[BatchRun] = field(default_factory=list)


def measure(
    engine: Engine, recorder: StepRecorder, workload: Workload, *, num_iters: int, num_iters_warmup: int, seed: int
) -> Measurement:
    """Run a workload: warm up, then ``num_iters`` times a batch that generates one token and one that generates all.

    The prefix cache is emptied before each batch.

    Args:
        engine: Otherwise idle.
        recorder: Receives the engine's steps.
        num_iters_warmup: Batches with the same prompts' lengths and up to 8 tokens of output, which do not count.
        seed: Of the prompts.

    Raises:
        PagedLLMError: A request is refused or fails.
    """
    rng = np.random.default_rng(seed)
    info = engine.model_info()

    def run(output_len: int) -> BatchRun:
        requests = random_requests(
            replace(workload, output_len=output_len),
            rng,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
        )
        engine.reset_prefix_cache()
        recorder.take()
        batch = asyncio.run(_run_batch(engine, requests))
        engine.stats()  # answered between two steps, so the last one has been recorded
        return replace(batch, steps=recorder.take())

    measurement = Measurement(workload=workload)
    for _ in range(num_iters_warmup):
        measurement.warmups.append(run(min(workload.output_len, _WARMUP_OUTPUT_LEN)))
    for _ in range(num_iters):
        measurement.prefills.append(run(1))
        measurement.runs.append(run(workload.output_len))
    return measurement


async def _run_batch(engine: Engine, requests: list[GenerateRequest]) -> BatchRun:
    start = time.monotonic()
    answers = await ask_together(engine, requests)
    return BatchRun(
        duration_s=time.monotonic() - start,
        ttft_s=[answer.ttft_s for answer in answers],
        gaps_s=[gap for answer in answers for gap in answer.gaps_s],
        num_output_tokens=sum(len(answer.arrivals) for answer in answers),
        num_cached_tokens=sum(answer.num_cached_tokens for answer in answers),
        steps=[],
    )
