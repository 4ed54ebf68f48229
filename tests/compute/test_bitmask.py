"""Masks of grammars on logits, against unpacked bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedllm.compute.bitmask import apply_bitmask


@pytest.mark.parametrize("vocab_size", [64, 77, 1000])
@pytest.mark.parametrize("rows", [[0, 1, 2], [2], [0, 2]])
def test_bits_ban_their_tokens(vocab_size: int, rows: list[int]) -> None:
    """A bit out of its place, a row of another's, or logits changed under those who report log probabilities."""
    rng = np.random.default_rng(1)
    bitmask = rng.integers(-(2**31), 2**31, (len(rows), (vocab_size + 31) // 32), dtype=np.int64).astype(np.int32)
    logits = torch.randn(3, vocab_size)
    before = logits.clone()
    masked = apply_bitmask(logits, torch.from_numpy(bitmask), rows)
    allowed = np.unpackbits(bitmask.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size].astype(bool)
    want = before.clone()
    for row, mask in zip(rows, allowed, strict=True):
        want[row, torch.from_numpy(~mask)] = float("-inf")
    assert torch.equal(masked, want)
    assert torch.equal(logits, before)
