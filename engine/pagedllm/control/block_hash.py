"""Names for prefixes: a chain of hashes, one for each full block, the same on every machine.

The prefix cache itself compares tokens and needs no hashes. They are for whoever has to speak of cached prefixes
without having them: a router asks which replica holds the longest chain.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

__all__ = ["HASH_BYTES", "block_hashes", "chain_hash", "root_hash"]

# Of SHA-256. Half of it is out of reach of chance and of anybody who looks for a collision.
HASH_BYTES = 16


def root_hash(salt: str | None) -> bytes:
    """What the chains of a salt begin with; no two salts have one in common."""
    return hashlib.sha256(b"pagedllm" if salt is None else b"pagedllm\0" + salt.encode()).digest()[:HASH_BYTES]


def chain_hash(parent: bytes, tokens: bytes) -> bytes:
    """The name of a block whose predecessor is ``parent``.

    Args:
        tokens: Its ids, packed in four bytes each.
    """
    return hashlib.sha256(parent + tokens).digest()[:HASH_BYTES]


def block_hashes(token_ids: Sequence[int], block_size: int, salt: str | None) -> list[bytes]:
    """The chain of a prompt's full blocks that can be reused: one token at least is always computed.

    Args:
        token_ids: The prompt.
        block_size: Tokens per block.
        salt: Separates prefixes of different owners.
    """
    chain, parent, pack = [], root_hash(salt), struct.Struct(f"{block_size}I").pack
    for begin in range(0, (len(token_ids) - 1) // block_size * block_size, block_size):
        parent = chain_hash(parent, pack(*token_ids[begin : begin + block_size]))
        chain.append(parent)
    return chain
