"""Attention of single new tokens over their paged KV: split-KV (Flash-Decoding, Dao et al., 2023) and a merge.

One program takes a sequence, a KV head and a share of the sequence's positions. All query heads that use the KV head
are rows of one small matrix, so a key is read once for all of them. KV is read once, so the floor is its bytes over the
memory's bandwidth; the matrix units are used because they are at hand, at a few percent of their rate. A second kernel
merges the shares. The grid depends on the number of sequences alone, so that a CUDA graph fits every length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_tile import attend_tiles, finish
from .call import PER_BATCH, KernelCall
from .launch import DecodeLaunch

__all__ = ["plan_decode"]


# fmt: off
@triton.jit
def _share(seq_len, split, window, NUM_SPLITS: tl.constexpr, LEAST: tl.constexpr, HAS_WINDOW: tl.constexpr):
    # fmt: on
    """First position and end of a share. Shares are equal, and multiples of LEAST; empty ones come last."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(seq_len - window, 0)
    size = tl.cdiv(tl.cdiv(seq_len - first, NUM_SPLITS), LEAST) * LEAST
    begin = first + split * size
    return begin, tl.minimum(begin + size, seq_len)


# fmt: off
@triton.jit(do_not_specialize=PER_BATCH)
def _decode_kernel(
    qkv_ptr, key_ptr, value_ptr, out_ptr, partial_ptr, weight_ptr, tables_ptr, cu_seqlens_ptr, seq_lens_ptr,
    scale, soft_cap, window, qkv_stride, table_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr, LEAST: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
):
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(cu_seqlens_ptr + seq)
    num_queries = tl.load(cu_seqlens_ptr + seq + 1) - token
    seq_len = tl.load(seq_lens_ptr + seq)
    begin, end = _share(seq_len, split, window, NUM_SPLITS, LEAST, HAS_WINDOW)
    # Longer queries are prefill's. Of padding, which has no positions, the first share writes zeros.
    if (num_queries == 1) & ((begin < end) | (split == 0)):
        GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
        rows = tl.arange(0, ROWS)
        columns = tl.arange(0, PADDED)
        heads = kv_head * GROUP + rows
        inside = (rows < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
        places = heads[:, None] * HEAD_DIM + columns[None, :]
        query = tl.load(qkv_ptr + token.to(tl.int64) * qkv_stride + places, mask=inside, other=0.0)
        own = tl.zeros([ROWS], tl.int32) + (seq_len - 1)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        summed = tl.zeros([ROWS, PADDED], tl.float32)
        table_ptr = tables_ptr + seq.to(tl.int64) * table_stride
        num_full = tl.maximum(end - begin, 0) // TILE
        rest = begin + num_full * TILE
        num_rest = tl.cdiv(tl.maximum(end - rest, 0), TILE)
        top, total, summed = attend_tiles(
            query, own, top, total, summed, key_ptr, value_ptr, table_ptr, kv_head, begin, num_full, end,
            scale, soft_cap, window,
            NUM_KV_HEADS, HEAD_DIM, PADDED, BLOCK_SIZE, TILE, False, HAS_WINDOW, HAS_CAP)
        top, total, summed = attend_tiles(
            query, own, top, total, summed, key_ptr, value_ptr, table_ptr, kv_head, rest, num_rest, end,
            scale, soft_cap, window,
            NUM_KV_HEADS, HEAD_DIM, PADDED, BLOCK_SIZE, TILE, True, HAS_WINDOW, HAS_CAP)
        attended = finish(total, summed)
        if NUM_SPLITS == 1:
            out = out_ptr + token.to(tl.int64) * (NUM_HEADS * HEAD_DIM) + places
            tl.store(out, attended.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            part = (seq.to(tl.int64) * NUM_SPLITS + split) * NUM_HEADS
            tl.store(partial_ptr + part * HEAD_DIM + places, attended, mask=inside)
            # What the share weighs, in powers of 2.
            tl.store(weight_ptr + part + heads, top + tl.log2(tl.maximum(total, 1e-37)), mask=rows < GROUP)


@triton.jit
def _merge_kernel(
    partial_ptr, weight_ptr, out_ptr, cu_seqlens_ptr, seq_lens_ptr, window,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, NUM_SPLITS: tl.constexpr,
    LEAST: tl.constexpr, HAS_WINDOW: tl.constexpr,
):
    # fmt: on
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    token = tl.load(cu_seqlens_ptr + seq).to(tl.int64)
    num_queries = tl.load(cu_seqlens_ptr + seq + 1) - token
    if num_queries == 1:
        splits = tl.arange(0, NUM_SPLITS)
        columns = tl.arange(0, PADDED)
        begin, end = _share(tl.load(seq_lens_ptr + seq), splits, window, NUM_SPLITS, LEAST, HAS_WINDOW)
        is_used = (begin < end) | (splits == 0)
        parts = (seq * NUM_SPLITS + splits) * NUM_HEADS + head
        weights = tl.load(weight_ptr + parts, mask=is_used, other=float("-inf"))
        top = tl.max(weights, axis=0)
        shares = tl.exp2(weights - tl.where(top == float("-inf"), 0.0, top))
        shares = shares / tl.maximum(tl.sum(shares, axis=0), 1e-37)
        inside = is_used[:, None] & (columns < HEAD_DIM)[None, :]
        attended = tl.load(partial_ptr + parts[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0)
        merged = tl.sum(attended * shares[:, None], axis=0)
        out = out_ptr + (token * NUM_HEADS + head) * HEAD_DIM + columns
        tl.store(out, merged.to(out_ptr.dtype.element_ty), mask=columns < HEAD_DIM)


def plan_decode(
    launch: DecodeLaunch, tensors: dict[str, Tensor], numbers: dict[str, float], constants: dict[str, int]
) -> list[KernelCall]:
    """Decode attention, and the merge where there are several shares.

    Args:
        tensors, numbers, constants: What both attention kernels take, by the names of their parameters.
    """
    num_seqs, num_heads = tensors["seq_lens_ptr"].shape[0], constants["NUM_HEADS"]
    shape = (num_seqs, launch.num_splits, num_heads) if launch.num_splits > 1 else (0, 0, 0)
    weight = torch.empty(shape, dtype=torch.float32, device=tensors["out_ptr"].device)
    partial = weight.new_empty(*shape, constants["HEAD_DIM"])
    splitting = {"NUM_SPLITS": launch.num_splits, "LEAST": launch.least}
    attend = KernelCall(
        kernel=_decode_kernel,
        grid=(num_seqs, constants["NUM_KV_HEADS"], launch.num_splits),
        args={**tensors, **numbers, "partial_ptr": partial, "weight_ptr": weight},
        constants={**constants, **splitting, "ROWS": launch.rows, "TILE": launch.tile},
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    if launch.num_splits == 1:
        return [attend]
    shared = ("out_ptr", "cu_seqlens_ptr", "seq_lens_ptr")
    merge = KernelCall(
        kernel=_merge_kernel,
        grid=(num_seqs, num_heads),
        args={
            **{name: tensors[name] for name in shared},
            "window": numbers["window"],
            "partial_ptr": partial,
            "weight_ptr": weight,
        },
        constants={
            **{name: constants[name] for name in ("NUM_HEADS", "HEAD_DIM", "PADDED", "HAS_WINDOW")},
            **splitting,
        },
        # At most 32 shares of 128 columns: 16 elements a thread with 8 warps, but 4 leave room for more programs.
        num_warps=4,
    )
    return [attend, merge]
