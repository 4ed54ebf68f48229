"""Tells a listener which prefixes the cache holds, as it comes to hold and to drop them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from .block_hash import chain_hash, root_hash

__all__ = ["KVEvent", "KVEventListener", "KVEvents"]


@dataclass(frozen=True, slots=True)
class KVEvent:
    """A change of what the prefix cache holds.

    Args:
        kind: ``stored``: the block is there, on the device or the host. ``removed``: it is in no tier any more.
            ``cleared``: nothing is there any more.
        block_hash: Chained hash of the block; empty for ``cleared``.
    """

    kind: Literal["stored", "removed", "cleared"]
    block_hash: bytes = b""


KVEventListener = Callable[[KVEvent], None]


class KVEvents:
    """Names the nodes of a prefix cache by their chained hashes. Made only when somebody listens.

    Args:
        listener: Told of each event at once, in the thread that owns the cache; it must be quick.
        edges: The cache's, parents before their children; all that is there is told.
        salts: Of its roots.
    """

    def __init__(
        self, listener: KVEventListener, edges: Mapping[tuple[int, bytes], int], salts: Mapping[int, str | None]
    ) -> None:
        self._listener = listener
        self._salts = salts
        self._hashes: dict[int, bytes] = {}
        for edge, node in edges.items():
            self.stored(node, edge)

    def stored(self, node: int, edge: tuple[int, bytes]) -> None:
        """A node is new: below a parent, with the packed tokens of its block."""
        parent, tokens = edge
        before = root_hash(self._salts[parent]) if parent in self._salts else self._hashes[parent]
        self._hashes[node] = chain_hash(before, tokens)
        self._listener(KVEvent("stored", self._hashes[node]))

    def removed(self, node: int) -> None:
        """A node is gone; roots, which have no block, are nobody's news."""
        block_hash = self._hashes.pop(node, None)
        if block_hash is not None:
            self._listener(KVEvent("removed", block_hash))

    def cleared(self) -> None:
        self._hashes.clear()
        self._listener(KVEvent("cleared"))
