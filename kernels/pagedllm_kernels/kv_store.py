"""Writing new keys and values into their slots of the paged cache."""

from __future__ import annotations

from torch import Tensor

__all__ = ["kv_store"]


def kv_store(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store one token's key and value per slot, in place.

    Args:
        key: [num_tokens, num_kv_heads, head_dim].
        value: As ``key``.
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim].
        value_cache: As ``key_cache``.
        slot_mapping: [num_tokens] int64, ``block_id * block_size + offset``; no slot twice.
    """
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key)
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)
