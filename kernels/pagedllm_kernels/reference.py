"""The operations in plain torch: what every other implementation is compared with, and what serves without one."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from .activation import gelu_tanh_mul, silu_mul
from .interface import Linear
from .kv_store import kv_store
from .paged_attention import paged_attention
from .rms_norm import norm_heads, rms_norm
from .rope import apply_rope
from .sampling import greedy, sample

__all__ = ["ReferenceKernels"]


class ReferenceKernels:
    """Implements ``Kernels``."""

    name = "reference"

    def prepare_linear(self, weight: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Linear:
        return partial(_multiply, weight=weight, bias=bias, dtype=dtype or weight.dtype)

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        if delta is not None:
            x += delta
        return rms_norm(x, weight, eps, dtype=dtype)

    def norm_heads(self, qkv: Tensor, query_weight: Tensor, key_weight: Tensor, num_kv_heads: int, eps: float) -> None:
        norm_heads(qkv, query_weight, key_weight, num_kv_heads, eps)

    def rope_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        table: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        num_kv_heads, head_dim = key_cache.shape[2:]
        heads = qkv.unflatten(-1, (-1, head_dim))  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
        rotated = heads[:, :-num_kv_heads]
        rotated.copy_(apply_rope(rotated, positions, table))
        key, value = heads[:, -2 * num_kv_heads : -num_kv_heads], heads[:, -num_kv_heads:]
        kv_store(key, value, key_cache, value_cache, slot_mapping)

    def paged_attention(
        self,
        qkv: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        scale: float,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        num_kv_heads, head_dim = key_cache.shape[2:]
        query = qkv.unflatten(-1, (-1, head_dim))[:, : -2 * num_kv_heads]
        tables = (block_tables, cu_seqlens_q, seq_lens)
        attended = paged_attention(query, key_cache, value_cache, *tables, scale, window=window, soft_cap=soft_cap)
        return attended.flatten(1)

    def gated_activation(self, gate_up: Tensor, *, gelu: bool) -> Tensor:
        return gelu_tanh_mul(gate_up) if gelu else silu_mul(gate_up)

    def greedy(self, logits: Tensor) -> Tensor:
        return greedy(logits)

    def sample(
        self, logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, keys: Tensor
    ) -> Tensor:
        return sample(logits, temperatures, top_ks, top_ps, min_ps, keys)


def _multiply(x: Tensor, *, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return linear(x, weight, bias).to(dtype)
