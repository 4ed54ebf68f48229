"""Copying blocks within a pool, and out of it and back."""

from __future__ import annotations

import pytest
import torch

from pagedllm_kernels.triton.kv_copy import copy_blocks


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_shape", [(16, 2, 64), (5, 3, 16), (1, 1, 2)])
def test_blocks_move_in_every_plane(dtype: torch.dtype, block_shape: tuple[int, ...]):
    """A plane's stride is mistaken, or the end of a piece is cut off or overrun."""
    pool = torch.randn(4, 7, *block_shape).to(dtype)
    expected = pool.clone()
    expected[:, [0, 6]] = pool[:, [3, 1]]
    copy_blocks(pool, pool, ids(3, 1), ids(0, 6))
    assert torch.equal(pool, expected)


def test_out_to_a_buffer_of_whole_blocks_and_back():
    """What is swapped in is what was swapped out, and other blocks stay as they are."""
    pool = torch.randn(3, 6, 4, 2, 8)
    before = pool.clone()
    staged = torch.full((4, 3, 4, 2, 8), torch.nan)
    by_plane = staged.transpose(0, 1)
    copy_blocks(pool, by_plane, ids(5, 0, 2), ids(0, 1, 2))
    assert torch.equal(staged[:3], before[:, [5, 0, 2]].transpose(0, 1))
    assert staged[3].isnan().all()
    pool[:, [5, 0, 2]] = torch.nan
    copy_blocks(by_plane, pool, ids(0, 1, 2), ids(5, 0, 2))
    assert torch.equal(pool, before)


def test_nothing_to_copy():
    pool = torch.randn(1, 2, 4)
    before = pool.clone()
    copy_blocks(pool, pool, ids(), ids())
    assert torch.equal(pool, before)
