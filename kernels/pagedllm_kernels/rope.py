"""Rotary position embedding (Su et al., 2021, arXiv 2104.09864), in the half-split layout of the Llama family."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["apply_rope", "rope_table"]


def rope_table(inv_freq: Tensor, num_positions: int, *, amplitude: float = 1.0) -> Tensor:
    """Cosines and sines of every position.

    Args:
        inv_freq: [head_dim / 2], radians per position.
        num_positions: Length of the table.
        amplitude: Factor of cosines and sines; a rotation by the table then also scales by it.

    Returns:
        [num_positions, head_dim] float32: cosines in the first half, sines in the second.
    """
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inv_freq.float())
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * amplitude


def apply_rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotate each pair ``(x[i], x[i + head_dim / 2])`` by its position's angle; computed in float32.

    Args:
        x: [num_tokens, num_heads, head_dim].
        positions: [num_tokens] int64.
        table: [num_positions, head_dim] float32, of ``rope_table``.

    Returns:
        [num_tokens, num_heads, head_dim], dtype of ``x``.
    """
    cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, head_dim / 2] each
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
