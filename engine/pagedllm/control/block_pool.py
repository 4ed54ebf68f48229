"""The fixed set of KV blocks: which are free, and how many holders each of the others has."""

from __future__ import annotations

__all__ = ["BlockPool"]


class BlockPool:
    """Hands out block ids and counts references.

    A block without references is either free (may be handed out) or idle (kept by the prefix cache). The pool does
    not know the difference: whoever drops the last reference decides, by calling ``recycle`` or not.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        # A stack: the block freed last is the one most likely still in the processor's cache.
        self.free_ids = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self.free_ids)

    def allocate(self) -> int:
        """Take a free block, with one reference. The caller has checked ``num_free``."""
        block_id = self.free_ids.pop()
        self.ref_counts[block_id] = 1
        return block_id

    def acquire(self, block_id: int) -> None:
        """Add a reference to a block that is in use or idle."""
        self.ref_counts[block_id] += 1

    def release(self, block_id: int) -> bool:
        """Drop a reference; True when it was the last one."""
        assert self.ref_counts[block_id] > 0, f"block {block_id} released more often than acquired"
        self.ref_counts[block_id] -= 1
        return self.ref_counts[block_id] == 0

    def recycle(self, block_id: int) -> None:
        """Make a block without references free again."""
        assert self.ref_counts[block_id] == 0
        self.free_ids.append(block_id)
