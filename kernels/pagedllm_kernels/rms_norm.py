"""Root-mean-square normalisation (Zhang and Sennrich, 2019, arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rms_norm"]


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
