"""Who is to know when a block comes to the prefix cache: those whose match it would make longer, and a listener."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .kv_events import KVEvents

__all__ = ["Edge", "WatchedEdges"]

Edge = tuple[int, bytes]
"""A node of the prefix cache, and the packed tokens of a block below it."""


class WatchedEdges:
    """Lets many wait for blocks without looking again in every step, and one listen to all.

    Attributes:
        epoch: While it is the same, nothing that is watched has come.
        events: Tells somebody of every edge that comes and goes; None while nobody listens.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.events: KVEvents | None = None
        self._counts: Counter[Edge] = Counter()

    def watch(self, edge: Edge) -> None:
        self._counts[edge] += 1

    def unwatch(self, edge: Edge) -> None:
        """Take back one ``watch``."""
        self._counts[edge] -= 1
        if not self._counts[edge]:
            del self._counts[edge]

    def check_integrity(self, edges: Iterable[Edge]) -> None:
        """Verify that exactly these are watched, each as often as it is given."""
        assert self._counts == Counter(edges), "an edge is watched for nobody, or is not"

    def note(self, edge: Edge, node: int) -> None:
        """An edge has come, to a node."""
        self.epoch += edge in self._counts
        if self.events is not None:
            self.events.stored(node, edge)

    def clear(self) -> None:
        """All nodes are going."""
        self.epoch += 1
        if self.events is not None:
            self.events.cleared()

    def forget(self, node: int) -> None:
        """A node has gone."""
        if self.events is not None:
            self.events.removed(node)
