"""The prefix cache: an exact trie over full blocks of tokens, kept flat.

An edge is ``(parent node, tokens of one full block) -> node``; looking it up compares the tokens themselves, so two
prompts never meet by a hash collision. There are no node objects: a node is an index into parallel lists, and a
hundred thousand of them give the garbage collector nothing to walk. One root per salt keeps tenants apart.

A node is *idle* when no sequence references its block. Idle leaves can be evicted, least recently used first; as
whoever references a node references its ancestors too, all idle nodes become evictable in turn.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["PrefixCache"]

_Edge = tuple[int, tuple[int, ...]]
_NO_PARENT = -1
_NO_BLOCK = -1


class PrefixCache:
    """Which block holds the KV of which token prefix.

    Args:
        block_size: Tokens per block, and per edge.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.num_idle = 0
        self._edges: dict[_Edge, int] = {}
        self._roots: dict[str | None, int] = {}
        self._salts: dict[int, str | None] = {}
        self._blocks: list[int] = []
        self._edge_of: list[_Edge] = []
        self._num_children: list[int] = []
        self._last_use: list[int] = []
        self._is_idle: list[bool] = []
        self._free_nodes: list[int] = []
        # Evictable leaves by last use. Entries go stale when a leaf is used again or gets a child; they are
        # recognised when popped, which is cheaper than finding them in the heap.
        self._leaf_heap: list[tuple[int, int]] = []
        self._clock = 0

    def __len__(self) -> int:
        return len(self._edges)

    def match(self, token_ids: Sequence[int], salt: str | None, max_blocks: int) -> list[int]:
        """Nodes of the longest cached prefix, at most ``max_blocks`` of them. Changes nothing."""
        node = self._roots.get(salt)
        nodes: list[int] = []
        if node is None:
            return nodes
        for start in range(0, max_blocks * self.block_size, self.block_size):
            tokens = tuple(token_ids[start : start + self.block_size])
            child = self._edges.get((node, tokens))
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def publish(self, parent: int | None, salt: str | None, tokens: tuple[int, ...], block_id: int) -> int:
        """The node for ``tokens`` below ``parent`` (None: below the salt's root).

        If the edge is new the node takes ``block_id``, otherwise it keeps its own and the caller's block stays
        private: block tables are append-only, so the caller goes on with the copy that it has.
        """
        assert len(tokens) == self.block_size
        if parent is None:
            parent = self._roots.get(salt)
            if parent is None:
                parent = self._roots[salt] = self._new_node((_NO_PARENT, ()), _NO_BLOCK)
                self._salts[parent] = salt
        node = self._edges.get((parent, tokens))
        if node is None:
            node = self._new_node((parent, tokens), block_id)
            self._edges[(parent, tokens)] = node
            self._num_children[parent] += 1
        return node

    def block_of(self, node: int) -> int:
        return self._blocks[node]

    def is_idle(self, node: int) -> bool:
        return self._is_idle[node]

    def tick(self) -> None:
        """Advance the clock of "last use": what goes idle between two ticks is equally old."""
        self._clock += 1

    def set_idle(self, node: int) -> None:
        """The last reference to the node's block is gone."""
        assert not self._is_idle[node]
        self._is_idle[node] = True
        self._last_use[node] = self._clock
        self.num_idle += 1
        if self._num_children[node] == 0:
            self._push_leaf(node)

    def set_used(self, node: int) -> None:
        """The node's block is referenced again."""
        assert self._is_idle[node]
        self._is_idle[node] = False
        self.num_idle -= 1

    def evict(self) -> int:
        """Drop the least recently used idle leaf and return its block. The caller has checked ``num_idle``."""
        while True:
            last_use, node = heapq.heappop(self._leaf_heap)
            if self._is_evictable(node, last_use):
                block_id = self._blocks[node]
                self.num_idle -= 1
                self._remove(node)
                return block_id

    def check_integrity(self, ref_counts: Sequence[int]) -> dict[int, int]:
        """Verify the trie against the pool's reference counts; returns ``{block: node}``."""
        node_of_block: dict[int, int] = {}
        num_children = [0] * len(self._blocks)
        for edge, node in self._edges.items():
            assert self._edge_of[node] == edge, f"node {node} is filed under another edge"
            num_children[edge[0]] += 1
            block_id = self._blocks[node]
            assert block_id not in node_of_block, f"block {block_id} is in the trie twice"
            node_of_block[block_id] = node
            assert self._is_idle[node] == (ref_counts[block_id] == 0), f"node {node}: idle flag is wrong"
        assert num_children == self._num_children, "child counts are wrong"
        assert self.num_idle == sum(self._is_idle[node] for node in node_of_block.values())
        assert all(num_children[root] > 0 for root in self._roots.values()), "a root without children"
        leaves = {node for last_use, node in self._leaf_heap if self._is_evictable(node, last_use)}
        expected = {node for node in node_of_block.values() if self._is_idle[node] and num_children[node] == 0}
        assert leaves == expected, "the heap of evictable leaves is wrong"
        return node_of_block

    def _new_node(self, edge: _Edge, block_id: int) -> int:
        if self._free_nodes:
            node = self._free_nodes.pop()
            self._blocks[node], self._edge_of[node] = block_id, edge
            return node
        self._blocks.append(block_id)
        self._edge_of.append(edge)
        self._num_children.append(0)
        self._last_use.append(0)
        self._is_idle.append(False)
        return len(self._blocks) - 1

    def _remove(self, node: int) -> None:
        edge = self._edge_of[node]
        parent = edge[0]
        del self._edges[edge]
        self._discard(node)
        self._num_children[parent] -= 1
        if self._num_children[parent] > 0:
            return
        if parent in self._salts:
            del self._roots[self._salts.pop(parent)]
            self._discard(parent)
        elif self._is_idle[parent]:
            self._push_leaf(parent)

    def _discard(self, node: int) -> None:
        self._blocks[node], self._edge_of[node], self._is_idle[node] = _NO_BLOCK, (_NO_PARENT, ()), False
        self._free_nodes.append(node)

    def _is_evictable(self, node: int, last_use: int) -> bool:
        return self._is_idle[node] and self._num_children[node] == 0 and self._last_use[node] == last_use

    def _push_leaf(self, node: int) -> None:
        heapq.heappush(self._leaf_heap, (self._last_use[node], node))
        if len(self._leaf_heap) > 2 * self.num_idle + 1024:
            valid = {entry for entry in self._leaf_heap if self._is_evictable(entry[1], entry[0])}
            self._leaf_heap = sorted(valid)
