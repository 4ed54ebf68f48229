"""Grammars on logits: a mask of bits bans the tokens that a grammar does not allow."""

from __future__ import annotations

from collections.abc import Sequence as List

import torch
from torch import Tensor

__all__ = ["apply_bitmask"]


def apply_bitmask(logits: Tensor, bitmask: Tensor, rows: List[int]) -> Tensor:
    """Set the logits of banned tokens to -inf.

    Args:
        logits: [num_rows, vocab_size] float32; not changed.
        bitmask: [len(rows), num_words] int32, little-endian: bit ``i % 32`` of word ``i // 32`` allows token ``i``. At
            least ``vocab_size`` bits wide.
        rows: Which rows it is for; the others stay as they are.

    Returns:
        [num_rows, vocab_size]
    """
    # What each byte adds to its eight logits: a look-up is several times as quick as unpacking the bits.
    bits = torch.arange(256, device=logits.device).unsqueeze(1) >> torch.arange(8, device=logits.device) & 1
    table = torch.zeros(256, 8, device=logits.device).masked_fill_(bits == 0, float("-inf"))
    biases = table[bitmask.view(torch.uint8).int()].flatten(1)[:, : logits.shape[1]]  # [len(rows), vocab_size]
    if len(rows) == len(logits):
        return logits + biases
    masked = logits.clone()
    masked[list(rows)] += biases
    return masked
