"""Copying whole KV blocks: within the pool, and between the pool and a staging buffer for swapping.

A pool is [num_planes, num_blocks, ...]: keys and values of every layer are planes, and a block has a piece in each.
Moving pieces one by one with ``copy_`` would be one call for every block and plane; here all are one launch. A staging
buffer has the pieces of a block side by side, so that one transfer moves a whole block, or several. Bound by memory:
each byte is read and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .call import KernelCall

__all__ = ["copy_blocks", "plan_copy"]

_WORDS_PER_PROGRAM = 2048


@triton.jit
def _copy_kernel(
    source_ptr,
    target_ptr,
    source_ids_ptr,
    target_ids_ptr,
    source_plane,
    source_block,
    target_plane,
    target_block,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i = tl.program_id(0)
    plane = tl.program_id(1).to(tl.int64)
    words = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    source = tl.load(source_ids_ptr + i).to(tl.int64)
    target = tl.load(target_ids_ptr + i).to(tl.int64)
    inside = words < WORDS
    piece = tl.load(source_ptr + plane * source_plane + source * source_block + words, mask=inside, other=0)
    tl.store(target_ptr + plane * target_plane + target * target_block + words, piece, mask=inside)


def plan_copy(source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> KernelCall:
    """Piece ``source_ids[i]`` of every plane to ``target_ids[i]``; one program per block, plane and 8 KiB.

    Args:
        source: [num_planes, num_source_blocks, ...]; a piece is contiguous, planes and blocks lie anywhere.
        target: [num_planes, num_target_blocks, ...]; likewise, changed. May be ``source``, as long as no block is both
            read and written.
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
            "source_block": source.stride(1),
            "target_plane": target.stride(0),
            "target_block": target.stride(1),
        },
        constants={"WORDS": words, "CHUNK": _WORDS_PER_PROGRAM},
        # 16 words a thread, as four loads of 16 bytes that are in flight together.
        num_warps=4,
    )


def copy_blocks(source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Copy blocks on the current stream; see ``plan_copy``."""
    plan_copy(source, target, source_ids, target_ids).launch()
