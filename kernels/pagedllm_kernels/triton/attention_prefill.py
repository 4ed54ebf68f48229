"""Attention of several new tokens per sequence: chunks, whole prompts and any mix, over paged KV.

Queries of all sequences are cut into blocks; a block's queries times the query heads of one KV head are the rows of one
matrix, so a tile of keys serves them all. Sequence ``i`` owns the blocks from ``cu_seqlens_q[i] // QUERIES + i`` on,
which leaves each at least as many as it needs. The grid is that bound, known without looking at the lengths; a program
counts how many sequences begin before it to find its own, and blocks that nobody needs end at once. Bound by matrix
products: 4 * head_dim operations per visible pair of query head and key.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .attention_tile import attend_tiles, finish
from .call import PER_BATCH, KernelCall
from .launch import PrefillLaunch

__all__ = ["plan_prefill"]

_SEQUENCES_PER_LOOK = 256


@triton.jit
def _find_sequence(cu_seqlens_ptr, num_seqs, block, QUERIES: tl.constexpr, LOOK: tl.constexpr):
    """Which sequence owns a block of queries: the last whose first block is not behind it."""
    found = -1
    for first in range(0, num_seqs, LOOK):
        seqs = first + tl.arange(0, LOOK)
        begin = tl.load(cu_seqlens_ptr + seqs, mask=seqs < num_seqs, other=0) // QUERIES + seqs
        found += tl.sum(((begin <= block) & (seqs < num_seqs)).to(tl.int32), axis=0)
    return found


# fmt: off
@triton.jit(do_not_specialize=PER_BATCH)
def _prefill_kernel(
    qkv_ptr, key_ptr, value_ptr, out_ptr, tables_ptr, cu_seqlens_ptr, seq_lens_ptr,
    scale, soft_cap, window, qkv_stride, table_stride, num_seqs,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, LOOK: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
):
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    QUERIES: tl.constexpr = ROWS // GROUP
    # The last queries see most: they begin first, so that none of them is left alone at the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = _find_sequence(cu_seqlens_ptr, num_seqs, block, QUERIES, LOOK)
    first_token = tl.load(cu_seqlens_ptr + seq)
    num_queries = tl.load(cu_seqlens_ptr + seq + 1) - first_token
    offset = (block - first_token // QUERIES - seq) * QUERIES
    if (offset < num_queries) & (num_queries > 1):  # single queries are decode's
        num_before = tl.load(seq_lens_ptr + seq) - num_queries
        rows = tl.arange(0, ROWS)
        columns = tl.arange(0, PADDED)
        queries = offset + rows // GROUP
        own = num_before + queries
        heads = kv_head * GROUP + rows % GROUP
        inside = ((queries < num_queries) & (rows < QUERIES * GROUP))[:, None] & (columns < HEAD_DIM)[None, :]
        tokens = (first_token + queries).to(tl.int64)
        places = (tokens * qkv_stride + heads * HEAD_DIM)[:, None] + columns[None, :]
        query = tl.load(qkv_ptr + places, mask=inside, other=0.0)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        summed = tl.zeros([ROWS, PADDED], tl.float32)
        table_ptr = tables_ptr + seq.to(tl.int64) * table_stride
        # Three stretches of tiles: cut by the window for some row, seen whole by all, and cut by a row's own position.
        first_position = num_before + offset
        last_position = tl.minimum(first_position + QUERIES, num_before + num_queries) - 1
        begin = 0
        if HAS_WINDOW:
            begin = tl.maximum(first_position - window + 1, 0)
        num_lead = 0
        num_whole = (first_position + 1 - begin) // TILE
        num_tiles = tl.cdiv(last_position + 1 - begin, TILE)
        if HAS_WINDOW:
            num_lead = tl.minimum(tl.cdiv(tl.maximum(last_position - window + 1 - begin, 0), TILE), num_whole)
            top, total, summed = attend_tiles(
                query, own, top, total, summed, key_ptr, value_ptr, table_ptr, kv_head, begin, num_lead,
                last_position + 1, scale, soft_cap, window,
                NUM_KV_HEADS, HEAD_DIM, PADDED, BLOCK_SIZE, TILE, True, HAS_WINDOW, HAS_CAP)
        top, total, summed = attend_tiles(
            query, own, top, total, summed, key_ptr, value_ptr, table_ptr, kv_head, begin + num_lead * TILE,
            num_whole - num_lead, last_position + 1, scale, soft_cap, window,
            NUM_KV_HEADS, HEAD_DIM, PADDED, BLOCK_SIZE, TILE, False, HAS_WINDOW, HAS_CAP)
        top, total, summed = attend_tiles(
            query, own, top, total, summed, key_ptr, value_ptr, table_ptr, kv_head, begin + num_whole * TILE,
            num_tiles - num_whole, last_position + 1, scale, soft_cap, window,
            NUM_KV_HEADS, HEAD_DIM, PADDED, BLOCK_SIZE, TILE, True, HAS_WINDOW, HAS_CAP)
        out = out_ptr + (tokens * (NUM_HEADS * HEAD_DIM) + heads * HEAD_DIM)[:, None] + columns[None, :]
        tl.store(out, finish(total, summed).to(out_ptr.dtype.element_ty), mask=inside)
# fmt: on


def plan_prefill(
    launch: PrefillLaunch, tensors: dict[str, Tensor], numbers: dict[str, float], constants: dict[str, int]
) -> KernelCall:
    """Prefill attention.

    Args:
        tensors, numbers, constants: What both attention kernels take, by the names of their parameters.
    """
    num_tokens, num_seqs = tensors["qkv_ptr"].shape[0], tensors["seq_lens_ptr"].shape[0]
    num_queries = launch.rows // (constants["NUM_HEADS"] // constants["NUM_KV_HEADS"])
    return KernelCall(
        kernel=_prefill_kernel,
        grid=(num_tokens // num_queries + num_seqs, constants["NUM_KV_HEADS"]),
        args={**tensors, **numbers, "num_seqs": num_seqs},
        constants={**constants, "ROWS": launch.rows, "TILE": launch.tile, "LOOK": _SEQUENCES_PER_LOOK},
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
