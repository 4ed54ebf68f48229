"""Grammars on logits: a mask of bits bans the tokens that a grammar does not allow."""

from __future__ import annotations

import functools
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
    # A look-up is several times as quick as unpacking the bits, and index_select as indexing.
    places = bitmask.view(torch.uint8).flatten().int()
    biases = _bias_table(logits.device).index_select(0, places).view(len(bitmask), -1)
    biases = biases[:, : logits.shape[1]]  # [len(rows), vocab_size]
    if len(rows) == len(logits):
        return logits + biases
    masked = logits.clone()
    masked[list(rows)] += biases
    return masked


@functools.cache
def _bias_table(device: torch.device) -> Tensor:
    """What each byte of a mask adds to its eight logits: [256, 8] float32."""
    bits = torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device) & 1
    return torch.zeros(256, 8, device=device).masked_fill_(bits == 0, float("-inf"))
