"""A prefix tree of the document sequences that were served last, and the walk through it that reuses most."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

__all__ = ["Candidate", "DocumentTree"]

# Steps of one walk, over all branches that it tries: it stays far below a millisecond.
_MAX_STEPS = 256

Candidate = Callable[[int, Sequence[int]], Sequence[int]]
"""Which of the open items may come next: ``(position, items still open)`` -> some of them."""


class _Node:
    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.children: dict[bytes, _Node] = {}
        self.count = 0  # remembered sequences that go through here


class DocumentTree:
    """Not safe from several threads at once.

    Args:
        max_sequences: How many sequences are remembered; the oldest are forgotten first.
    """

    def __init__(self, max_sequences: int) -> None:
        self._max_sequences = max_sequences
        self._root = _Node()
        self._sequences: deque[tuple[bytes, ...]] = deque()
        self._popularity: Counter[bytes] = Counter()

    def popularity(self, key: bytes) -> int:
        """How many of the remembered sequences have this document."""
        return self._popularity[key]

    def add(self, keys: Sequence[bytes]) -> None:
        """Remember a sequence."""
        if len(self._sequences) >= self._max_sequences:
            self._forget(self._sequences.popleft())
        self._sequences.append(tuple(keys))
        self._popularity.update(set(keys))
        node = self._root
        for key in keys:
            node = node.children.setdefault(key, _Node())
            node.count += 1

    def prune(self, keys: Sequence[bytes]) -> None:
        """Forget all sequences that begin with these documents beyond all but the last of them."""
        gone = [item for item in self._sequences if item[: len(keys)] == tuple(keys)]
        for item in gone:
            self._sequences.remove(item)
            self._forget(item)
            self.add(item[: len(keys) - 1])

    def walk(self, keys: Sequence[bytes], weights: Sequence[int], candidates: Candidate) -> list[int]:
        """The longest way from the root over some of the given documents, by weight.

        Args:
            keys: The documents, each of which may be used once.
            weights: What it is worth to reuse each of them.
            candidates: Which may stand at a place.

        Returns:
            Indexes of ``keys``, in order.
        """
        best: list[int] = []
        best_weight = num_steps = 0
        stack: list[tuple[_Node, list[int], int]] = [(self._root, [], 0)]
        while stack and num_steps < _MAX_STEPS:
            node, path, weight = stack.pop()
            num_steps += 1
            if weight > best_weight:
                best, best_weight = path, weight
            open_items = [index for index in range(len(keys)) if index not in path]
            steps = [
                (node.children[keys[index]], index)
                for index in candidates(len(path), open_items)
                if keys[index] in node.children
            ]
            # The most used branch is on top of the stack, so it is tried first.
            steps.sort(key=lambda step: step[0].count)
            stack += [(child, [*path, index], weight + weights[index]) for child, index in steps]
        return best

    def _forget(self, keys: Sequence[bytes]) -> None:
        for key in set(keys):
            self._popularity[key] -= 1
            if not self._popularity[key]:
                del self._popularity[key]
        node = self._root
        for key in keys:
            child = node.children[key]
            child.count -= 1
            if not child.count:
                del node.children[key]
                return
            node = child
