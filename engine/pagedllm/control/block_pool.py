"""The fixed set of KV blocks: which are free, and how many holders each of the others has."""

from __future__ import annotations

from collections.abc import Iterable

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

    def allocate(self, num_blocks: int) -> list[int]:
        """Take free blocks, each with one reference. The caller has checked ``num_free``."""
        block_ids = [self.free_ids.pop() for _ in range(num_blocks)]
        for block_id in block_ids:
            self.ref_counts[block_id] = 1
        return block_ids

    def acquire(self, block_id: int) -> None:
        """Add a reference to a block that is in use or idle."""
        self.ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> list[int]:
        """Drop a reference of each; returns those of which it was the last."""
        ref_counts, released = self.ref_counts, []
        for block_id in block_ids:
            assert ref_counts[block_id] > 0, f"block {block_id} released more often than acquired"
            ref_counts[block_id] -= 1
            if ref_counts[block_id] == 0:
                released.append(block_id)
        return released

    def recycle(self, block_id: int) -> None:
        """Make a block without references free again."""
        assert self.ref_counts[block_id] == 0
        self.free_ids.append(block_id)
