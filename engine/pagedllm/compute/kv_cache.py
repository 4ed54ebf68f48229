"""The tensors behind the KV blocks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .models.config import ModelConfig

__all__ = ["KVCache", "kv_bytes_per_token"]


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token takes over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


class KVCache:
    """Keys and values of all layers, in blocks.

    Attributes:
        keys: Per layer [num_blocks, block_size, num_kv_heads, head_dim].
        values: As ``keys``.
    """

    def __init__(self, config: ModelConfig, *, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.block_size = block_size
        self.keys = [_untouched_zeros(shape, dtype) for _ in range(config.num_layers)]
        self.values = [_untouched_zeros(shape, dtype) for _ in range(config.num_layers)]


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose pages the system provides at first write: numpy asks calloc, where torch would fill them.

    A pool is sized for the worst case, so most of its pages may never be needed.
    """
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
