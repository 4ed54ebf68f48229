"""Gated activations of the MLP (Shazeer 2020, arXiv 2002.05202), and the soft cap."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["gelu_tanh_mul", "silu_mul", "soft_cap"]


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` (SwiGLU).

    Args:
        gate_up: [num_tokens, 2 * intermediate_size]: gate, then up.

    Returns:
        [num_tokens, intermediate_size].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """``gelu(gate) * up`` with GELU's approximation by tanh (GeGLU).

    Args:
        gate_up: [num_tokens, 2 * intermediate_size]: gate, then up.

    Returns:
        [num_tokens, intermediate_size].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``: nearly ``x`` where it is small, never beyond ``cap`` (Gemma 2, arXiv 2408.00118).

    Args:
        x: [...].
        cap: Above 0.

    Returns:
        As ``x``.
    """
    return torch.tanh(x / cap) * cap
