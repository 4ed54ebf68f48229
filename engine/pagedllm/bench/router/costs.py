"""How long a step takes, by what is in it: measured once, then used for any number of simulated engines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...api import Engine, GenerateRequest, SamplingParams
from ...core import StepRecord
from ...errors import ConfigError

__all__ = ["StepCosts", "fit_costs", "measure_costs", "read_costs"]

_PROMPT_LENS = (16, 64, 128, 256, 384, 512)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
_DECODE_LEN = 24
_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """A step's time is a sum.

    Args:
        step_s: Of any step.
        prompt_token_s: More for each token of a prompt.
        decode_s: More for each sequence that gets a token.
        source: What was measured.
    """

    step_s: float
    prompt_token_s: float
    decode_s: float
    source: str = ""

    def duration(self, num_prompt_tokens: int, num_decoding: int) -> float:
        """Seconds that a step takes."""
        return self.step_s + num_prompt_tokens * self.prompt_token_s + num_decoding * self.decode_s

    def work(self, num_prompt_tokens: int, output_len: int, *, batch_size: int = 8) -> float:
        """Seconds of an engine that a request takes, computed as a whole, its steps shared by a batch."""
        return num_prompt_tokens * self.prompt_token_s + output_len * (self.step_s / batch_size + self.decode_s)


def measure_costs(engine: Engine, records: list[StepRecord], *, source: str) -> StepCosts:
    """Run single prompts and batches that decode, and fit the sum to the steps' times.

    Args:
        engine: Appends each of its steps to ``records``; with a token budget of at least 512.
    """
    rows: list[tuple[int, int, float]] = []
    for round_number in range(_ROUNDS):
        for length in _PROMPT_LENS:
            records.clear()
            engine.generate([_request(length, 1, first=1000 + round_number * 10_000)])
            rows += [(item.num_tokens, 0, item.duration_s) for item in records if item.num_admitted]
        for size in _BATCH_SIZES:
            records.clear()
            engine.generate([_request(8, _DECODE_LEN, first=round_number * 100 + index) for index in range(size)])
            rows += [
                (0, size, item.duration_s) for item in records if item.num_tokens == size and not item.num_admitted
            ]
    return fit_costs(rows, source=source)


def fit_costs(rows: Sequence[tuple[int, int, float]], *, source: str) -> StepCosts:
    """The sum nearest to measured steps, relative errors squared; no part of it is negative.

    Args:
        rows: Prompt tokens, decoding sequences and seconds of each step.
    """
    prompt, decode, seconds = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    features = np.stack([np.ones_like(seconds), prompt, decode], axis=1) / seconds[:, None]
    kept = [0, 1, 2]
    while True:
        solution, *_ = np.linalg.lstsq(features[:, kept], np.ones_like(seconds), rcond=None)
        if (solution >= 0).all():
            break
        kept = [column for column, value in zip(kept, solution, strict=True) if value >= 0]
    values = dict(zip(kept, (float(value) for value in solution), strict=True))
    return StepCosts(
        step_s=values.get(0, 0.0), prompt_token_s=values.get(1, 0.0), decode_s=values.get(2, 0.0), source=source
    )


def read_costs(path: Path) -> StepCosts:
    """Costs from the JSON that was written of them.

    Raises:
        ConfigError: The file is not that.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        costs = StepCosts(**content)
        numbers = (costs.step_s, costs.prompt_token_s, costs.decode_s)
        if not all(isinstance(number, (int, float)) and number >= 0 for number in numbers) or not sum(numbers):
            raise ValueError("times must be numbers of at least 0, not all of them 0")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"the cost model {str(path)!r} cannot be read: {error}") from error
    return costs


def _request(num_tokens: int, output_len: int, *, first: int) -> GenerateRequest:
    prompt = tuple((first * 7 + index * 13) % 900 + 50 for index in range(num_tokens))
    return GenerateRequest(
        prompt=prompt, sampling=SamplingParams(max_tokens=output_len, temperature=0, ignore_eos=True)
    )
