"""Copying blocks within a pool, and out of it and back."""

from __future__ import annotations

import pytest
import torch

from pagedllm_kernels.triton.kv_copy import copy_blocks, gather_blocks, scatter_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_shape", [(16, 2, 64), (5, 3, 16), (1, 1, 2)])
def test_blocks_move_in_every_plane(dtype: torch.dtype, block_shape: tuple[int, ...]):
    """A plane's stride is mistaken, or the end of a piece is cut off or overrun."""
    pool = torch.randn(4, 7, *block_shape).to(dtype)
    expected = pool.clone()
    expected[:, [0, 6]] = pool[:, [3, 1]]
    copy_blocks(pool, torch.tensor([3, 1], dtype=torch.int32), torch.tensor([0, 6], dtype=torch.int32))
    assert torch.equal(pool, expected)


def test_out_and_back():
    """What is swapped in is what was swapped out, and other blocks stay as they are."""
    pool = torch.randn(3, 6, 4, 2, 8)
    before = pool.clone()
    ids = torch.tensor([5, 0, 2], dtype=torch.int32)
    saved = gather_blocks(pool, ids)
    assert torch.equal(saved, before[:, ids])
    pool[:, ids] = torch.nan
    scatter_blocks(pool, ids, saved)
    assert torch.equal(pool, before)


def test_nothing_to_copy():
    pool = torch.randn(1, 2, 4)
    assert gather_blocks(pool, torch.empty(0, dtype=torch.int32)).shape == (1, 0, 4)
