"""Copying whole KV blocks: within the pool, and between the pool and a staging buffer for swapping.

A pool is [num_planes, num_blocks, ...]: keys and values of every layer are planes, and a block has a piece in each.
Moving pieces one by one with ``copy_`` would be one call for every block and plane; here all are one launch. Bound by
memory: each byte is read and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .call import KernelCall

__all__ = ["copy_blocks", "gather_blocks", "plan_copy", "scatter_blocks"]

_WORDS_PER_PROGRAM = 2048


@triton.jit
def _copy_kernel(
    source_ptr,
    target_ptr,
    source_ids_ptr,
    target_ids_ptr,
    source_plane,
    target_plane,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i = tl.program_id(0)
    plane = tl.program_id(1).to(tl.int64)
    words = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    source = tl.load(source_ids_ptr + i).to(tl.int64)
    target = tl.load(target_ids_ptr + i).to(tl.int64)
    inside = words < WORDS
    piece = tl.load(source_ptr + plane * source_plane + source * WORDS + words, mask=inside, other=0)
    tl.store(target_ptr + plane * target_plane + target * WORDS + words, piece, mask=inside)


def plan_copy(source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> KernelCall:
    """Piece ``source_ids[i]`` of every plane to ``target_ids[i]``; one program per block, plane and 8 KiB.

    Args:
        source: [num_planes, num_source_blocks, ...], contiguous.
        target: [num_planes, num_target_blocks, ...]; may be ``source``, as long as no block is both read and written.
        source_ids: [num_copies] int32.
        target_ids: [num_copies] int32, none twice.
    """
    # As words of 4 bytes the copy is the same for every dtype.
    source, target = (pool.flatten(2).view(torch.int32) for pool in (source, target))
    words = source.shape[2]
    return KernelCall(
        kernel=_copy_kernel,
        grid=(source_ids.shape[0], source.shape[0], triton.cdiv(words, _WORDS_PER_PROGRAM)),
        args={
            "source_ptr": source,
            "target_ptr": target,
            "source_ids_ptr": source_ids,
            "target_ids_ptr": target_ids,
            "source_plane": source.stride(0),
            "target_plane": target.stride(0),
        },
        constants={"WORDS": words, "CHUNK": _WORDS_PER_PROGRAM},
        # 16 words a thread, as four loads of 16 bytes that are in flight together.
        num_warps=4,
    )


def copy_blocks(pool: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Copy blocks within a pool; see ``plan_copy``."""
    plan_copy(pool, pool, source_ids, target_ids).launch()


def gather_blocks(pool: Tensor, block_ids: Tensor) -> Tensor:
    """Blocks side by side, as a buffer to send away: [num_planes, len(block_ids), ...]."""
    out = pool.new_empty(pool.shape[0], block_ids.shape[0], *pool.shape[2:])
    plan_copy(pool, out, block_ids, torch.arange(block_ids.shape[0], dtype=torch.int32, device=pool.device)).launch()
    return out


def scatter_blocks(pool: Tensor, block_ids: Tensor, blocks: Tensor) -> None:
    """The reverse of ``gather_blocks``; changes ``pool``."""
    order = torch.arange(block_ids.shape[0], dtype=torch.int32, device=pool.device)
    plan_copy(blocks, pool, order, block_ids).launch()
