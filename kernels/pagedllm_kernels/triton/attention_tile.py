"""What decode and prefill attention share: tiles of keys and values folded into running softmax sums.

The online softmax of FlashAttention (Dao et al., 2022, arXiv 2205.14135), in powers of 2, which the hardware computes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import tanh

__all__ = ["attend_tiles", "finish"]

_LOG2_E = tl.constexpr(1.4426950408889634)  # what a kernel reads from outside must be a constexpr


@triton.jit
def finish(total, summed):
    """Weighted mean from sums; 0 for a row that has seen nothing."""
    return summed / tl.where(total == 0.0, 1.0, total)[:, None]


# fmt: off
@triton.jit
def attend_tiles(
    query, query_positions, top, total, summed, key_ptr, value_ptr, table_ptr, kv_head, begin, num_tiles, end,
    scale, soft_cap, window,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
):
    # fmt: on
    """Fold ``num_tiles`` tiles of positions from ``begin`` on into the sums of a block of queries.

    ``query`` is [ROWS, PADDED], ``query_positions`` [ROWS]; ``top`` and ``total`` [ROWS] are the largest score in
    powers of 2 and the sum of weights, ``summed`` [ROWS, PADDED] the weighted values. Where MASKED, positions from
    ``end`` on are not read, and each query sees only those up to its own and within its window; else all see all.
    """
    columns = tl.arange(0, PADDED)
    for tile in range(num_tiles):
        positions = begin + tile * TILE + tl.arange(0, TILE)
        inside = (columns < HEAD_DIM)[None, :]
        if MASKED:
            blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=positions < end, other=0).to(tl.int64)
            inside = inside & (positions < end)[:, None]
        else:
            blocks = tl.load(table_ptr + positions // BLOCK_SIZE).to(tl.int64)
        rows = (blocks * BLOCK_SIZE + positions % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
        places = rows[:, None] * HEAD_DIM + columns[None, :]  # a token's key is one stretch, wherever its block is
        key = tl.load(key_ptr + places, mask=inside, other=0.0)
        # float32 is not rounded to tf32; other dtypes are multiplied as they are.
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if HAS_CAP:  # noqa: SIM108 - a branch of the compiler's
            scores = tanh(scores * (scale / soft_cap)) * (soft_cap * _LOG2_E)
        else:
            scores = scores * (scale * _LOG2_E)
        if MASKED:
            visible = (positions < end)[None, :] & (positions[None, :] <= query_positions[:, None])
            if HAS_WINDOW:
                visible = visible & (positions[None, :] > query_positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        # For a row that has seen nothing yet: -inf minus -inf would be NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        value = tl.load(value_ptr + places, mask=inside, other=0.0)
        total = total * shrink + tl.sum(weights, axis=1)
        summed = tl.dot(weights.to(value.dtype), value, summed * shrink[:, None], input_precision="ieee")
        top = new_top
    return top, total, summed
