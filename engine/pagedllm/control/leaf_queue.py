"""The order in which leaves of the prefix cache give way: least recently used first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

__all__ = ["LeafQueue"]


class LeafQueue:
    """A heap of nodes by their last use.

    Entries go stale when a leaf is used again, pinned or gets a child. They are recognised when popped, which is
    cheaper than finding them in the heap.

    Args:
        is_leaf: Whether a node may give way now and, unless it is None, was last used at the given time.
    """

    def __init__(self, is_leaf: Callable[[int, int | None], bool]) -> None:
        self._is_leaf = is_leaf
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        """Entries, stale ones among them."""
        return len(self._heap)

    def push(self, node: int, last_use: int, max_leaves: int) -> None:
        """Add a node; ``max_leaves`` tells how many there can be, and so when stale entries are too many."""
        heapq.heappush(self._heap, (last_use, node))
        if len(self._heap) > 2 * max_leaves + 1024:
            self._heap = sorted({entry for entry in self._heap if self._is_leaf(entry[1], entry[0])})

    def pop(self) -> int | None:
        """The least recently used leaf; None if there is none."""
        while self._heap:
            last_use, node = heapq.heappop(self._heap)
            if self._is_leaf(node, last_use):
                return node
        return None

    def clear(self) -> None:
        self._heap.clear()

    def check_integrity(self, nodes: Iterable[int]) -> None:
        """Verify that exactly the leaves among these nodes would be popped."""
        found = {node for last_use, node in self._heap if self._is_leaf(node, last_use)}
        assert found == {node for node in nodes if self._is_leaf(node, None)}, "the queue of leaves is wrong"
