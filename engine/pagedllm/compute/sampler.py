"""From logits to token ids, each row by its own sequence's parameters."""

from __future__ import annotations

from collections.abc import Sequence as List

import torch
from torch import Tensor

from pagedllm_kernels.sampling import greedy, sample

from ..control.sequence import Sequence

__all__ = ["GREEDY_BELOW", "Sampler", "noise_key"]

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy (vLLM's bound): dividing by them would only overflow."""

_MASK = 2**64 - 1


class Sampler:
    """Samples one token per row of logits."""

    def __call__(self, logits: Tensor, sequences: List[Sequence]) -> list[int]:
        """Choose the next token of each sequence.

        Args:
            logits: [len(sequences), vocab_size] float32.
            sequences: The rows' owners, with every sampling parameter filled in.
        """
        token_ids: list[int] = greedy(logits).tolist()
        rows = [i for i, sequence in enumerate(sequences) if (sequence.sampling.temperature or 0.0) >= GREEDY_BELOW]
        if rows:
            drawn = self._draw(logits[rows], [sequences[i] for i in rows])
            for i, token_id in zip(rows, drawn, strict=True):
                token_ids[i] = token_id
        return token_ids

    def _draw(self, logits: Tensor, sequences: List[Sequence]) -> list[int]:
        vocab_size = logits.shape[1]
        params = [sequence.sampling for sequence in sequences]
        top_ks = [p.top_k if p.top_k is not None and 0 < p.top_k < vocab_size else vocab_size for p in params]
        token_ids: list[int] = sample(
            logits,
            temperatures=torch.tensor([p.temperature for p in params]),
            top_ks=torch.tensor(top_ks),
            top_ps=torch.tensor([1.0 if p.top_p is None else p.top_p for p in params]),
            keys=torch.tensor([noise_key(item.seed, item.index, item.num_tokens) for item in sequences]),
        ).tolist()
        return token_ids


def noise_key(seed: int, index: int, position: int) -> tuple[int, int]:
    """64 bits, in two halves, that depend only on seed, sample index and token position.

    Batching, chunking and preemption therefore cannot change a sampled text. The three are absorbed one after the
    other by the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    state = 0
    for value in (seed, index, position):
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 32, state & 0xFFFFFFFF
