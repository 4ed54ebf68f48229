"""The operations on a GPU."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..interface import Linear
from .activation import gated_activation, tanh
from .call import is_interpreted
from .kv_copy import copy_blocks
from .paged_attention import paged_attention
from .rms_norm import add_rms_norm, norm_heads
from .rope import rope_store
from .sampling import sample

__all__ = ["TritonKernels"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256


class TritonKernels:
    """Implements ``Kernels`` and ``CopyKernels``.

    Calls return before the device is done; results are safe on the same stream.
    """

    name = "triton"

    @staticmethod
    def refusal(dtype: torch.dtype, *, device: torch.device, head_dim: int) -> str | None:
        """Why these kernels cannot run a model of that dtype and shape there; None if they can."""
        if dtype not in _DTYPES:
            return f"dtype {dtype} is not one of float32, bfloat16 and float16"
        if device.type != "cuda" and not is_interpreted(tanh):
            return f"device {device} is no GPU (for tests, TRITON_INTERPRET=1 runs them on the CPU)"
        if device.type == "cpu" and dtype == torch.bfloat16:
            return "Triton's interpreter multiplies the bits of bfloat16"
        if head_dim % 2 or head_dim > _MAX_HEAD_DIM:
            return f"head_dim={head_dim} is odd or above {_MAX_HEAD_DIM}"
        return None

    @staticmethod
    def failure(device: torch.device) -> str | None:
        """Why a small kernel fails on a GPU; None if it runs.

        Only a trial tells: Triton wants a C compiler and Python's headers, and a GPU and a driver that it knows.
        """
        try:
            gated_activation(torch.zeros(1, 32, device=device), gelu=False).cpu()
        except Exception as error:  # of Triton, of its compiler or of the driver
            reason = str(error).strip() or type(error).__name__
            return f"a trial on {device} failed: {reason.splitlines()[0]}"
        return None

    def prepare_linear(self, weight: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Linear:
        dtype = dtype or weight.dtype
        if dtype == torch.float32 and weight.dtype != dtype and weight.is_cuda and bias is None:
            return partial(_multiply_wide, weight=weight)
        return partial(_multiply, weight=weight, bias=bias, dtype=dtype)

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        return add_rms_norm(x, delta, weight, eps, dtype)

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
        rope_store(qkv, positions, table, key_cache, value_cache, slot_mapping)

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
        tables = (block_tables, cu_seqlens_q, seq_lens)
        return paged_attention(qkv, key_cache, value_cache, *tables, scale, window=window, soft_cap=soft_cap)

    def gated_activation(self, gate_up: Tensor, *, gelu: bool) -> Tensor:
        return gated_activation(gate_up, gelu=gelu)

    def copy_blocks(self, source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
        copy_blocks(source, target, source_ids, target_ids)

    def greedy(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=-1)

    def sample(
        self, logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, keys: Tensor
    ) -> Tensor:
        return sample(logits, temperatures, top_ks, top_ps, min_ps, keys)


def _multiply(x: Tensor, *, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return linear(x, weight, bias).to(dtype)


def _multiply_wide(x: Tensor, *, weight: Tensor) -> Tensor:
    """The product as its float32 sums, not rounded to the weights' dtype on the way; CUDA only."""
    return torch.mm(x, weight.t(), out_dtype=torch.float32)
