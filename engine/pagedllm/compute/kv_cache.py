"""The tensors behind the KV blocks."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

from .models.config import ModelConfig

__all__ = ["KVCache", "kv_bytes_per_token"]


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token takes over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


class KVCache:
    """Keys and values of all layers, in blocks, in one stretch of memory.

    On a CPU the system provides its pages at first write: a pool is sized for the worst case, so most may never be
    needed. They are large pages where the system has them, since attention jumps from block to block: with pages of
    4 KiB nearly each jump would cost a look-up in the page table.

    Attributes:
        keys: Per layer [num_blocks, block_size, num_kv_heads, head_dim].
        values: As ``keys``.
        blocks: The same memory by block [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim].
        planes: The same memory by plane [2 * num_layers, num_blocks, block_size, num_kv_heads, head_dim].
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        shape = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        # Zeros, not garbage: attention multiplies what it does not see by 0, and NaN would survive that.
        if device is None or device.type == "cpu":
            pool = _allocate_pages(math.prod(shape), dtype).view(shape)
        else:
            pool = torch.zeros(shape, dtype=dtype, device=device)
        self.block_size = block_size
        self.keys = [pool[layer, 0] for layer in range(config.num_layers)]
        self.values = [pool[layer, 1] for layer in range(config.num_layers)]
        # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
        self.blocks = pool.permute(2, 0, 1, 3, 4, 5)
        self.planes = pool.flatten(0, 1)


def _allocate_pages(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    memory = mmap.mmap(-1, num_elements * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a wish; a kernel without them says no
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)
