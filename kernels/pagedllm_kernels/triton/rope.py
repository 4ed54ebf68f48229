"""Rotary embedding of queries and keys, fused with storing keys and values in the cache.

Reads ``qkv`` once, writes queries and keys back and keys and values to their slots; bound by memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .call import KernelCall, next_power_of_2

__all__ = ["plan_rope_store", "rope_store"]

_HEADS_PER_PROGRAM = 8


@triton.jit
def _rope_store_kernel(
    qkv_ptr,
    positions_ptr,
    table_ptr,
    key_ptr,
    value_ptr,
    slots_ptr,
    qkv_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, PADDED)
    is_rotated = heads < NUM_HEADS + NUM_KV_HEADS
    inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (columns < HALF)[None, :]
    first_places = qkv_ptr + token * qkv_stride + heads[:, None] * (2 * HALF) + columns[None, :]
    first = tl.load(first_places, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(first_places + HALF, mask=inside, other=0.0).to(tl.float32)

    angles = table_ptr + tl.load(positions_ptr + token) * (2 * HALF) + columns
    cos = tl.load(angles, mask=columns < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=columns < HALF, other=0.0)
    # Values pass through unchanged.
    turned_first = tl.where(is_rotated[:, None], first * cos[None, :] - second * sin[None, :], first)
    turned_second = tl.where(is_rotated[:, None], second * cos[None, :] + first * sin[None, :], second)
    turned_first = turned_first.to(qkv_ptr.dtype.element_ty)
    turned_second = turned_second.to(qkv_ptr.dtype.element_ty)
    tl.store(first_places, turned_first, mask=inside & is_rotated[:, None])
    tl.store(first_places + HALF, turned_second, mask=inside & is_rotated[:, None])

    slot = tl.load(slots_ptr + token)
    if slot >= 0:  # padding has none
        is_key = (heads >= NUM_HEADS) & is_rotated
        key_places = key_ptr + (slot * NUM_KV_HEADS + heads - NUM_HEADS)[:, None] * (2 * HALF) + columns[None, :]
        tl.store(key_places, turned_first, mask=inside & is_key[:, None])
        tl.store(key_places + HALF, turned_second, mask=inside & is_key[:, None])
        value_heads = heads - NUM_HEADS - NUM_KV_HEADS
        value_places = value_ptr + (slot * NUM_KV_HEADS + value_heads)[:, None] * (2 * HALF) + columns[None, :]
        tl.store(value_places, turned_first, mask=inside & (value_heads >= 0)[:, None])
        tl.store(value_places + HALF, turned_second, mask=inside & (value_heads >= 0)[:, None])


def plan_rope_store(
    qkv: Tensor, positions: Tensor, table: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> KernelCall:
    """One program per token and eight heads, each with the two halves of its heads in registers."""
    num_kv_heads, head_dim = key_cache.shape[2:]
    num_all_heads = qkv.shape[1] // head_dim
    heads = min(_HEADS_PER_PROGRAM, next_power_of_2(num_all_heads))
    return KernelCall(
        kernel=_rope_store_kernel,
        grid=(qkv.shape[0], triton.cdiv(num_all_heads, heads)),
        args={
            "qkv_ptr": qkv,
            "positions_ptr": positions,
            "table_ptr": table,
            "key_ptr": key_cache,
            "value_ptr": value_cache,
            "slots_ptr": slot_mapping,
            "qkv_stride": qkv.stride(0),
        },
        constants={
            "NUM_HEADS": num_all_heads - 2 * num_kv_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HALF": head_dim // 2,
            "PADDED": next_power_of_2(head_dim // 2),
            "HEADS": heads,
        },
        # 8 heads of 128 are two halves of 4 elements a thread, each a load of 8 bytes.
        num_warps=4,
    )


def rope_store(
    qkv: Tensor, positions: Tensor, table: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """``Kernels.rope_store``. Slots below 0 are not written; what is beyond a table is not noticed."""
    plan_rope_store(qkv, positions, table, key_cache, value_cache, slot_mapping).launch()
