"""The gated activation of the Llama family's MLP (SwiGLU, Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

__all__ = ["silu_mul"]


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up``.

    Args:
        gate_up: [num_tokens, 2 * intermediate_size]: gate, then up.

    Returns:
        [num_tokens, intermediate_size].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
