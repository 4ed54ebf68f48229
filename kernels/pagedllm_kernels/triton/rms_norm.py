"""RMS norm of the residual stream, fused with the addition before it, and of the heads of queries and keys.

The first reads and writes a row once: 4 + 4 + 2 + 2 bytes per element in bfloat16, bound by memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .call import KernelCall, next_power_of_2

__all__ = ["add_rms_norm", "norm_heads", "plan_add_rms_norm", "plan_norm_heads"]

_HEADS_PER_PROGRAM = 8


@triton.jit
def _add_rms_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, out_ptr, eps, SIZE: tl.constexpr, PADDED: tl.constexpr, HAS_DELTA: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    inside = columns < SIZE
    x = tl.load(x_ptr + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta_ptr + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(x_ptr + row * SIZE + columns, x, mask=inside)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    tl.store(out_ptr + row * SIZE + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _norm_heads_kernel(
    qkv_ptr,
    query_weight_ptr,
    key_weight_ptr,
    eps,
    qkv_stride,
    NUM_HEADS: tl.constexpr,
    NUM_NORMED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, PADDED)
    inside = (heads < NUM_NORMED)[:, None] & (columns < HEAD_DIM)[None, :]
    places = qkv_ptr + token * qkv_stride + heads[:, None] * HEAD_DIM + columns[None, :]
    x = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    query_weight = tl.load(query_weight_ptr + columns, mask=columns < HEAD_DIM, other=0.0).to(tl.float32)
    key_weight = tl.load(key_weight_ptr + columns, mask=columns < HEAD_DIM, other=0.0).to(tl.float32)
    weight = tl.where((heads < NUM_HEADS)[:, None], query_weight[None, :], key_weight[None, :])
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)
    tl.store(places, (x * scale[:, None] * weight).to(qkv_ptr.dtype.element_ty), mask=inside)


def plan_add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> KernelCall:
    """One program per row; a row stays in registers between its sum and its scaling."""
    num_rows, size = x.shape
    padded = next_power_of_2(size)
    return KernelCall(
        kernel=_add_rms_norm_kernel,
        grid=(num_rows,),
        args={
            "x_ptr": x,
            "delta_ptr": x if delta is None else delta,
            "weight_ptr": weight,
            "out_ptr": out,
            "eps": eps,
        },
        constants={"SIZE": size, "PADDED": padded, "HAS_DELTA": delta is not None},
        # 16 elements a thread: enough loads in flight, and no spills up to rows of 16,384.
        num_warps=min(max(padded // 512, 1), 16),
    )


def plan_norm_heads(qkv: Tensor, query_weight: Tensor, key_weight: Tensor, num_kv_heads: int, eps: float) -> KernelCall:
    """One program per token and eight heads."""
    head_dim = query_weight.shape[0]
    num_normed = qkv.shape[1] // head_dim - num_kv_heads
    heads = min(_HEADS_PER_PROGRAM, next_power_of_2(num_normed))
    return KernelCall(
        kernel=_norm_heads_kernel,
        grid=(qkv.shape[0], triton.cdiv(num_normed, heads)),
        args={
            "qkv_ptr": qkv,
            "query_weight_ptr": query_weight,
            "key_weight_ptr": key_weight,
            "eps": eps,
            "qkv_stride": qkv.stride(0),
        },
        constants={
            "NUM_HEADS": num_normed - num_kv_heads,
            "NUM_NORMED": num_normed,
            "HEAD_DIM": head_dim,
            "PADDED": next_power_of_2(head_dim),
            "HEADS": heads,
        },
        # 8 heads of 128 are 8 elements a thread.
        num_warps=4,
    )


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """``Kernels.add_rms_norm``."""
    out = torch.empty_like(x, dtype=dtype)
    plan_add_rms_norm(x, delta, weight, eps, out).launch()
    return out


def norm_heads(qkv: Tensor, query_weight: Tensor, key_weight: Tensor, num_kv_heads: int, eps: float) -> None:
    """``Kernels.norm_heads``."""
    plan_norm_heads(qkv, query_weight, key_weight, num_kv_heads, eps).launch()
