"""What a long prompt that arrives does to a stream that is running: the gaps between its tokens."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from ..api import Engine, GenerateRequest
from ..errors import ConfigError
from .workloads import Workload, random_requests

__all__ = ["StallPlan", "measure_stall"]


@dataclass(frozen=True, kw_only=True)
class StallPlan:
    """What is measured.

    Args:
        stream_input_len: Prompt tokens of the stream.
        stream_len: Tokens of the stream.
        arrives_after: Tokens of the stream before the prompt is sent.
        prompt_len: Tokens of the prompt.
        num_rounds: How often.
        seed: Of the prompts.
    """

    stream_input_len: int
    stream_len: int
    arrives_after: int
    prompt_len: int
    num_rounds: int
    seed: int


def measure_stall(engine: Engine, plan: StallPlan) -> dict[str, Any]:
    """Stream, send the prompt meanwhile, and compare the gaps between the stream's tokens before and after.

    Raises:
        PagedLLMError: A request is refused or fails, or the plan leaves no gaps to compare.
    """
    if not 2 <= plan.arrives_after < plan.stream_len - 1:
        raise ConfigError.for_value("arrives_after", plan.arrives_after, "must leave gaps before and after")
    rng = np.random.default_rng(plan.seed)
    _run_once(engine, plan, rng)  # warms up
    rounds = [_run_once(engine, plan, rng) for _ in range(plan.num_rounds)]
    before = [median(gaps[: plan.arrives_after - 1]) for gaps, _ in rounds]
    worst = [max(gaps[plan.arrives_after - 1 :]) for gaps, _ in rounds]
    return {
        "gap_before_ms": 1000 * median(before),
        "largest_gap_after_ms": 1000 * median(worst),
        "stretch": median(after / base for after, base in zip(worst, before, strict=True)),
        "prompt_ttft_ms": 1000 * median(ttft for _, ttft in rounds),
    }


def _run_once(engine: Engine, plan: StallPlan, rng: np.random.Generator) -> tuple[list[float], float]:
    """The stream's gaps in seconds, and the prompt's time to first token."""
    info = engine.model_info()
    streamed, prompt = (
        random_requests(
            Workload(num_prompts=1, input_len=input_len, output_len=output_len),
            rng,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
        )[0]
        for input_len, output_len in ((plan.stream_input_len, plan.stream_len), (plan.prompt_len, 1))
    )
    engine.reset_prefix_cache()
    arrivals: list[float] = []
    waiting = _Arrival(engine, prompt)
    for chunk in engine.stream(streamed):
        arrivals += [time.perf_counter()] * len(chunk.token_ids)
        if len(arrivals) >= plan.arrives_after:
            waiting.start()
    return np.diff(arrivals).tolist(), waiting.finish()


class _Arrival:
    """A request that is sent and awaited in a thread of its own, so that the stream's consumer need not."""

    def __init__(self, engine: Engine, request: GenerateRequest) -> None:
        self._engine, self._request = engine, request
        self._thread: threading.Thread | None = None
        self._seconds: float | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """Send the request, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def finish(self) -> float:
        """Seconds from sending it to its last token; raises what it raised."""
        assert self._thread is not None
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._seconds is not None
        return self._seconds

    def _run(self) -> None:
        start = time.perf_counter()
        try:
            for _ in self._engine.stream(self._request):
                pass
            self._seconds = time.perf_counter() - start
        except BaseException as error:
            self._error = error
