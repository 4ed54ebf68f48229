"""Root-mean-square normalisation (Zhang and Sennrich, 2019, arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["norm_heads", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, dtype: torch.dtype | None = None) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension, computed in float32.

    Args:
        x: [..., size], of any floating dtype.
        weight: [size].
        eps: Added to the mean square.
        dtype: Of the result, to which it is rounded once at the end; None: that of ``weight``.

    Returns:
        [..., size].
    """
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normalised * weight.float()).to(weight.dtype if dtype is None else dtype)


def norm_heads(qkv: Tensor, query_weight: Tensor, key_weight: Tensor, num_kv_heads: int, eps: float) -> None:
    """``rms_norm`` of every head of queries and keys, in place; values stay.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; changed.
        query_weight: [head_dim].
        key_weight: [head_dim].
        num_kv_heads: Heads of the keys.
        eps: As in ``rms_norm``.
    """
    heads = qkv.unflatten(-1, (-1, query_weight.shape[0]))  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    queries, keys = heads[:, : -2 * num_kv_heads], heads[:, -2 * num_kv_heads : -num_kv_heads]
    queries.copy_(rms_norm(queries, query_weight, eps, dtype=qkv.dtype))
    keys.copy_(rms_norm(keys, key_weight, eps, dtype=qkv.dtype))
