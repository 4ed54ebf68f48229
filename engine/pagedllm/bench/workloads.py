"""What a benchmark sends: random prompts of a given length that share no prefix."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ..api import GenerateRequest, SamplingParams

__all__ = ["Workload", "random_requests"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One batch of equal requests, all sent at once.

    Args:
        num_prompts: Requests in the batch.
        input_len: Tokens of each prompt.
        output_len: Tokens generated for each, whatever they are (``ignore_eos``).
    """

    num_prompts: int
    input_len: int
    output_len: int


def random_requests(
    workload: Workload, rng: np.random.Generator, *, vocab_size: int, eos_token_ids: Collection[int]
) -> list[GenerateRequest]:
    """Draw the requests of a batch; greedy, so that sampling costs the same everywhere.

    The first tokens of the prompts are all different (as far as the vocabulary goes), so no block is shared within a
    batch. EOS ids do not occur: some models treat what follows them differently.
    """
    candidates = np.setdiff1d(np.arange(vocab_size), np.array(sorted(eos_token_ids), dtype=np.int64))
    token_ids = rng.choice(candidates, (workload.num_prompts, workload.input_len))  # [num_prompts, input_len]
    first = rng.permutation(candidates)[: workload.num_prompts]
    token_ids[: len(first), 0] = first
    sampling = SamplingParams(max_tokens=workload.output_len, temperature=0, ignore_eos=True)
    return [GenerateRequest(prompt=tuple(prompt), sampling=sampling) for prompt in token_ids.tolist()]
