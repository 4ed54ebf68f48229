"""Root-mean-square normalisation (Zhang and Sennrich, 2019, arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension, computed in float32.

    Args:
        x: [..., size], float32 or the dtype of ``weight``.
        weight: [size].
        eps: Added to the mean square.

    Returns:
        [..., size], dtype of ``weight``.
    """
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normalised * weight.float()).to(weight.dtype)
