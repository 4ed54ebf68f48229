"""Choosing tokens from logits: greedy, or by temperature, top-k and top-p."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["greedy", "sample"]


def greedy(logits: Tensor) -> Tensor:
    """The most probable token of each row; the lowest id among equals.

    Args:
        logits: [num_rows, vocab_size].

    Returns:
        [num_rows] int64.
    """
    return logits.argmax(dim=-1)


def sample(logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row by inverting the cumulative distribution at a given uniform number.

    Order of the filters as in vLLM and transformers: temperature, then top-k, then top-p on what remains (Holtzman et
    al., 2020, arXiv 1904.09751). Tokens equal to the last one kept are kept too, so that the result does not depend
    on a sort's order. The distribution is summed in order of token id in float64: rounding differences in the logits
    then move no boundary by more than themselves.

    Args:
        logits: [num_rows, vocab_size] float32.
        temperatures: [num_rows] float32, above 0.
        top_ks: [num_rows] int64, 1 to vocab_size.
        top_ps: [num_rows] float32, in (0, 1].
        uniforms: [num_rows] float64, in [0, 1).

    Returns:
        [num_rows] int64.
    """
    # Subtracting the maximum first keeps tiny temperatures from overflowing to inf.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures.unsqueeze(1)
    ranked = scaled.sort(dim=-1, descending=True).values
    scaled = scaled.masked_fill(scaled < ranked.gather(1, top_ks.unsqueeze(1) - 1), float("-inf"))
    ranked = ranked.masked_fill(ranked < ranked.gather(1, top_ks.unsqueeze(1) - 1), float("-inf"))
    ranked_probs = ranked.softmax(dim=-1, dtype=torch.float64)
    # A token is kept if those before it do not reach top_p yet; at least the first one always is.
    num_kept = (ranked_probs.cumsum(dim=-1) - ranked_probs < top_ps.unsqueeze(1)).sum(dim=-1, keepdim=True)
    scaled = scaled.masked_fill(scaled < ranked.gather(1, num_kept - 1), float("-inf"))
    cumulative = scaled.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    targets = (uniforms.unsqueeze(1) * cumulative[:, -1:]).contiguous()
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1)
