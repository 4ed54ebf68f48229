"""From logits to token ids, each row by its own sequence's parameters."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedllm_kernels.interface import Kernels

from ..control.sequence import Sequence
from .logits import adjust_logits

__all__ = ["GREEDY_BELOW", "Sampler", "Score", "is_filtered", "noise_key"]

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy (vLLM's bound): dividing by them would only overflow."""

_MASK = 2**64 - 1
_SCORED_ROWS = 64
_LEAST_LOGPROB = -9999.0
"""What is reported for -inf, which JSON cannot say (vLLM's value)."""


@dataclass(frozen=True, slots=True)
class Score:
    """A token's log probability under the raw logits, and the most probable tokens, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Samples one token per row of logits.

    Args:
        kernels: What chooses the tokens; the same ones whatever they are.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __call__(self, logits: Tensor, sequences: List[Sequence]) -> list[int]:
        """Choose the next token of each sequence.

        Args:
            logits: [len(sequences), vocab_size] float32.
            sequences: The rows' owners, with every sampling parameter filled in.
        """
        logits = adjust_logits(logits, sequences)
        rows = [i for i, sequence in enumerate(sequences) if (sequence.sampling.temperature or 0.0) >= GREEDY_BELOW]
        if rows and len(rows) == len(sequences):
            return self._draw(logits, sequences)
        token_ids: list[int] = self._kernels.greedy(logits).tolist()
        if rows:
            drawn = self._draw(logits[rows], [sequences[i] for i in rows])
            for i, token_id in zip(rows, drawn, strict=True):
                token_ids[i] = token_id
        return token_ids

    def score(self, logits: Tensor, token_ids: List[int], nums_top: List[int]) -> list[Score]:
        """Log probabilities of given tokens.

        Args:
            logits: [len(token_ids), vocab_size] float32, raw.
            token_ids: One per row.
            nums_top: How many of the most probable tokens to tell, per row.
        """
        scores: list[Score] = []
        # In slices: a long prompt's rows have vocab_size columns each.
        for start in range(0, len(token_ids), _SCORED_ROWS):
            rows = slice(start, start + _SCORED_ROWS)
            logprobs = logits[rows].log_softmax(dim=-1).clamp_min(_LEAST_LOGPROB)
            wanted = torch.tensor(token_ids[rows], device=logits.device).unsqueeze(1)
            chosen = logprobs.gather(1, wanted).squeeze(1).tolist()
            best = logprobs.topk(min(max(nums_top[rows]), logprobs.shape[1]), dim=-1)
            best_ids, best_logprobs = best.indices.tolist(), best.values.tolist()
            for i, (token_id, num_top) in enumerate(zip(token_ids[rows], nums_top[rows], strict=True)):
                top = tuple(zip(best_ids[i][:num_top], best_logprobs[i][:num_top], strict=True))
                scores.append(Score(token_id, chosen[i], top))
        return scores

    def _draw(self, logits: Tensor, sequences: List[Sequence]) -> list[int]:
        vocab_size = logits.shape[1]
        params = [sequence.sampling for sequence in sequences]
        top_ks = [p.top_k if p.top_k is not None and 0 < p.top_k < vocab_size else vocab_size for p in params]
        token_ids: list[int] = self._kernels.sample(
            logits,
            temperatures=torch.tensor([p.temperature for p in params]),
            top_ks=torch.tensor(top_ks),
            top_ps=torch.tensor([1.0 if p.top_p is None else p.top_p for p in params]),
            min_ps=torch.tensor([p.min_p for p in params]),
            keys=torch.tensor([noise_key(item.seed, item.index, item.num_tokens) for item in sequences]),
        ).tolist()
        return token_ids


def is_filtered(sequence: Sequence) -> bool:
    """Whether top-k, top-p or min-p may keep the best token with noise from being chosen."""
    params = sequence.sampling
    if (params.temperature or 0.0) < GREEDY_BELOW:
        return False
    return (params.top_k or 0) > 0 or (params.top_p or 1.0) < 1.0 or params.min_p > 0.0


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
