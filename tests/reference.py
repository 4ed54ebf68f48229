"""What a model should say, by transformers, and when a different token is excused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pagedllm.compute.forward_batch import ForwardBatch

FLOAT32_GAP = 1e-4
"""Below this gap between the two best logits, float32 rounding may decide; floating point is not batch-invariant."""
BFLOAT16_GAP = 0.1


@torch.inference_mode()
def assert_greedy(model: Any, prompt: Sequence[int], token_ids: Sequence[int], *, near_tie: float = FLOAT32_GAP) -> int:
    """Every token is the reference's best continuation of all before it, up to the first excused tie.

    One forward pass over the whole text checks what a loop of greedy decoding would give: as long as the ids agree,
    the loop would see the same text. In float32 a tie excuses only a difference; in bfloat16 (a wider ``near_tie``)
    the comparison ends at the first tie, because what follows may be another text.

    Args:
        model: A transformers causal language model in float32.
        token_ids: The continuation to check.
        near_tie: Gap between the reference's two best logits below which either may win.

    Returns:
        How many tokens were found equal.
    """
    text = [*prompt, *token_ids]
    logits = model(torch.tensor([text[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    best = logits.topk(2)
    for i, token_id in enumerate(token_ids):
        expected, gap = int(best.indices[i, 0]), float(best.values[i, 0] - best.values[i, 1])
        if gap < near_tie and (token_id != expected or near_tie > FLOAT32_GAP):
            return i
        assert token_id == expected, f"token {i} is {token_id}, not {expected}; the reference's gap is {gap:.2e}"
    return len(token_ids)


def whole_prompt(token_ids: list[int], block_size: int = 16) -> ForwardBatch:
    """A batch of one prompt that yields logits at every token."""
    count = len(token_ids)
    return ForwardBatch(
        input_ids=torch.tensor(token_ids),
        positions=torch.arange(count),
        slot_mapping=torch.arange(count),
        block_tables=torch.arange(-(-count // block_size), dtype=torch.int32).unsqueeze(0),
        cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        logits_indices=torch.arange(count),
    )
