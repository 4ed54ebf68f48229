"""The prefix cache: an exact trie over full blocks of tokens, kept flat.

An edge is ``(parent node, tokens of one full block) -> node``; looking it up compares the tokens themselves, so two
prompts never meet by a hash collision. There are no node objects: a node is an index into parallel lists, and a
hundred thousand of them give the garbage collector nothing to walk. One root per salt keeps tenants apart.

A node's KV is in a block of the device's pool or of the host's. On every path device nodes come before host nodes: a
device node moves to the host only when none of its children is on the device, and comes back only after its parent.

A device node is *idle* when no sequence references its block, and *pinned* when a pin holds it or a node below it.
Idle nodes without children on the device that are not pinned can be evicted, least recently used first; as whoever
references a node references its ancestors too, all idle nodes that are not pinned become evictable in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .leaf_queue import LeafQueue

__all__ = ["PrefixCache"]

_Edge = tuple[int, tuple[int, ...]]
_NO_PARENT = -1
_NO_BLOCK = -1


class PrefixCache:
    """Which block holds the KV of which token prefix.

    Args:
        block_size: Tokens per block, and per edge.

    Attributes:
        now: The time that goes into the nodes' records, in seconds; whoever drives the cache keeps it current.
        num_idle: Device nodes that nobody references.
        num_pinned: Device nodes that pins hold.
        num_pinned_idle: Those that are both.
        num_on_host: Host nodes.
        num_inserted: Nodes ever inserted; tells that a match may have become longer.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.now = 0.0
        self.num_idle = self.num_pinned = self.num_pinned_idle = self.num_on_host = self.num_inserted = 0
        self._edges: dict[_Edge, int] = {}
        self._roots: dict[str | None, int] = {}
        self._salts: dict[int, str | None] = {}
        self._blocks: list[int] = []
        self._host_blocks: list[int] = []
        self._edge_of: list[_Edge] = []
        self._num_children: list[int] = []
        self._num_device_children: list[int] = []
        self._last_use: list[int] = []
        self._is_idle: list[bool] = []
        self._is_worth_keeping: list[bool] = []
        self._num_pins: list[int] = []
        # Tells apart the nodes that have had the same number one after the other.
        self._generations: list[int] = []
        self._inserted_at: list[float] = []
        self._idle_since: list[float] = []
        self._free_nodes: list[int] = []
        self._device_leaves = LeafQueue(self._is_evictable)
        self._host_leaves = LeafQueue(self._is_host_leaf)
        self._protected: frozenset[int] = frozenset()
        self._clock = 0

    def __len__(self) -> int:
        return len(self._edges)

    # --- Looking up: nothing changes ---

    @property
    def num_evictable(self) -> int:
        """Device blocks that eviction can free."""
        return self.num_idle - self.num_pinned_idle

    def match(
        self, token_ids: Sequence[int], salt: str | None, max_blocks: int, *, start: Sequence[int] = ()
    ) -> list[int]:
        """Nodes of the longest cached prefix, at most ``max_blocks`` of them.

        Args:
            token_ids: The prompt.
            salt: Whose prefixes to look among.
            max_blocks: Where to stop.
            start: Nodes of a shorter match that is known already.
        """
        nodes = list(start)
        node = nodes[-1] if nodes else self._roots.get(salt)
        if node is None:
            return nodes
        size = self.block_size
        for begin in range(len(nodes) * size, max_blocks * size, size):
            child = self._edges.get((node, tuple(token_ids[begin : begin + size])))
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def find(self, parent: int | None, salt: str | None, tokens: tuple[int, ...]) -> int | None:
        """The node for ``tokens`` below ``parent`` (None: below the salt's root), if there is one."""
        node = self._roots.get(salt) if parent is None else parent
        return None if node is None else self._edges.get((node, tokens))

    def block_of(self, node: int) -> int:
        """The device block; only of a device node."""
        assert self._blocks[node] != _NO_BLOCK
        return self._blocks[node]

    def host_block_of(self, node: int) -> int:
        assert self._host_blocks[node] != _NO_BLOCK
        return self._host_blocks[node]

    def is_on_host(self, node: int) -> bool:
        return self._host_blocks[node] != _NO_BLOCK

    def is_idle(self, node: int) -> bool:
        return self._is_idle[node]

    def is_pinned(self, node: int) -> bool:
        return self._num_pins[node] > 0

    def must_keep(self, node: int) -> bool:
        """Whether dropping the node would lose more than it: it has children, all of them on the host."""
        return self._num_children[node] > 0

    def is_worth_keeping(self, node: int) -> bool:
        return self._is_worth_keeping[node]

    def generation_of(self, node: int) -> int:
        """Changes when the node is dropped, so that whoever remembers it can tell."""
        return self._generations[node]

    def age_of(self, node: int) -> float:
        """Seconds since its KV was cached."""
        return self.now - self._inserted_at[node]

    def idle_time_of(self, node: int) -> float:
        """Seconds since it was last referenced."""
        return self.now - self._idle_since[node]

    def nodes(self) -> Iterator[int]:
        return iter(self._edges.values())

    # --- References and pins ---

    def tick(self) -> None:
        """Advance the clock of "last use": what goes idle between two ticks is equally old."""
        self._clock += 1

    def set_idle(self, node: int, *, is_worth_keeping: bool = True) -> None:
        """The last reference to the node's block is gone.

        Args:
            node: A device node.
            is_worth_keeping: Whether to move it to the host, rather than drop it, when its block is needed.
        """
        assert not self._is_idle[node]
        self._is_idle[node] = True
        self._is_worth_keeping[node] = is_worth_keeping
        self._last_use[node] = self._clock
        self._idle_since[node] = self.now
        self.num_idle += 1
        self.num_pinned_idle += self._num_pins[node] > 0
        self._offer_for_eviction(node)

    def set_used(self, node: int) -> None:
        """The node's block is referenced again."""
        assert self._is_idle[node]
        self._is_idle[node] = False
        self.num_idle -= 1
        self.num_pinned_idle -= self._num_pins[node] > 0

    def pin(self, node: int) -> None:
        """Keep a device node, and with it its ancestors, from being evicted. Pins add up."""
        for item in self.path_to(node):
            assert self._blocks[item] != _NO_BLOCK
            self._num_pins[item] += 1
            if self._num_pins[item] == 1:
                self.num_pinned += 1
                self.num_pinned_idle += self._is_idle[item]

    def unpin(self, node: int) -> None:
        """Take back one ``pin``."""
        for item in self.path_to(node):
            assert self._num_pins[item] > 0
            self._num_pins[item] -= 1
            if self._num_pins[item] == 0:
                self.num_pinned -= 1
                self.num_pinned_idle -= self._is_idle[item]
                self._offer_for_eviction(item)

    # --- Growing, moving and shrinking ---

    def insert(self, parent: int | None, salt: str | None, tokens: tuple[int, ...], block_id: int) -> int:
        """A new device node, referenced, below a device node (None: below the salt's root)."""
        assert len(tokens) == self.block_size
        if parent is None:
            parent = self._roots.get(salt)
            if parent is None:
                parent = self._roots[salt] = self._new_node((_NO_PARENT, ()), _NO_BLOCK)
                self._salts[parent] = salt
        node = self._edges[(parent, tokens)] = self._new_node((parent, tokens), block_id)
        self._num_children[parent] += 1
        self._num_device_children[parent] += 1
        self.num_inserted += 1
        return node

    def protect(self, nodes: Iterable[int]) -> None:
        """Keep these host nodes from being dropped, instead of those protected before."""
        released, self._protected = self._protected, frozenset(nodes)
        for node in released - self._protected:
            self._offer_for_eviction(node)

    def move_to_device(self, node: int, block_id: int) -> int:
        """Give a host node a device block, which is referenced; returns the host block that it leaves."""
        host_block = self.host_block_of(node)
        self._host_blocks[node], self._blocks[node] = _NO_BLOCK, block_id
        self._num_device_children[self._edge_of[node][0]] += 1
        self.num_on_host -= 1
        return host_block

    def move_to_host(self, node: int, host_block: int) -> int:
        """Give an evictable device node a host block; returns the device block that it leaves."""
        block_id = self._leave_device(node)
        self._host_blocks[node] = host_block
        self.num_on_host += 1
        self._offer_for_eviction(node)
        return block_id

    def drop(self, node: int) -> int:
        """Forget a node without children, evictable or on the host; returns its block there."""
        assert self._num_children[node] == 0
        was_on_host = self.is_on_host(node)
        block_id = self._host_blocks[node] if was_on_host else self._leave_device(node)
        self.num_on_host -= was_on_host
        edge = self._edge_of[node]
        parent = edge[0]
        del self._edges[edge]
        self._discard(node)
        self._num_children[parent] -= 1
        if parent in self._salts:
            if self._num_children[parent] == 0:
                del self._roots[self._salts.pop(parent)]
                self._discard(parent)
        elif was_on_host:
            self._offer_for_eviction(parent)
        return block_id

    def clear(self) -> None:
        """Forget everything; whose blocks these were is the caller's to settle."""
        for node in (*self._edges.values(), *self._salts):
            self._discard(node)
        for counts in (self._num_children, self._num_device_children, self._num_pins):
            counts[:] = [0] * len(counts)
        for table in (self._edges, self._roots, self._salts):
            table.clear()
        self._device_leaves.clear()
        self._host_leaves.clear()
        self.num_idle = self.num_pinned = self.num_pinned_idle = self.num_on_host = 0
        self.num_inserted += 1

    def least_recent_leaf(self) -> int:
        """The device node to evict next. The caller has checked ``num_evictable``."""
        node = self._device_leaves.pop()
        assert node is not None
        return node

    def least_recent_host_leaf(self) -> int | None:
        """The host node to drop next; None if none may be."""
        return self._host_leaves.pop()

    def check_integrity(self, ref_counts: Sequence[int]) -> dict[int, int]:
        """Verify the trie against the device pool's reference counts; returns ``{device block: node}``."""
        node_of_block: dict[int, int] = {}
        num_children, num_device_children = [0] * len(self._blocks), [0] * len(self._blocks)
        for edge, node in self._edges.items():
            assert self._edge_of[node] == edge, f"node {node} is filed under another edge"
            num_children[edge[0]] += 1
            assert (self._blocks[node] == _NO_BLOCK) == self.is_on_host(node), f"node {node} is in two tiers or none"
            if self.is_on_host(node):
                assert not self._is_idle[node]
                assert self._num_pins[node] == 0
                continue
            num_device_children[edge[0]] += 1
            assert edge[0] in self._salts or not self.is_on_host(edge[0]), "a device node below a host node"
            block_id = self._blocks[node]
            assert block_id not in node_of_block, f"block {block_id} is in the trie twice"
            node_of_block[block_id] = node
            assert self._is_idle[node] == (ref_counts[block_id] == 0), f"node {node}: idle flag is wrong"
        assert num_children == self._num_children, "child counts are wrong"
        assert num_device_children == self._num_device_children, "child counts on the device are wrong"
        device = list(node_of_block.values())
        pinned = [node for node in device if self._num_pins[node] > 0]
        assert self.num_idle == sum(self._is_idle[node] for node in device)
        assert self.num_pinned == len(pinned)
        assert self.num_pinned_idle == sum(self._is_idle[node] for node in pinned)
        assert self.num_on_host == len(self._edges) - len(device)
        assert all(num_children[root] > 0 for root in self._roots.values()), "a root without children"
        self._device_leaves.check_integrity(device)
        self._host_leaves.check_integrity(node for node in self._edges.values() if self.is_on_host(node))
        return node_of_block

    def path_to(self, node: int) -> Iterator[int]:
        """The node and its ancestors."""
        while node not in self._salts:
            yield node
            node = self._edge_of[node][0]

    def _new_node(self, edge: _Edge, block_id: int) -> int:
        if self._free_nodes:
            node = self._free_nodes.pop()
            self._blocks[node], self._edge_of[node], self._inserted_at[node] = block_id, edge, self.now
            return node
        for counts in (self._num_children, self._num_device_children, self._last_use, self._num_pins):
            counts.append(0)
        self._blocks.append(block_id)
        self._host_blocks.append(_NO_BLOCK)
        self._edge_of.append(edge)
        self._is_idle.append(False)
        self._is_worth_keeping.append(True)
        self._generations.append(0)
        self._inserted_at.append(self.now)
        self._idle_since.append(self.now)
        return len(self._blocks) - 1

    def _leave_device(self, node: int) -> int:
        assert self._is_idle[node]
        assert self._num_device_children[node] == 0
        assert self._num_pins[node] == 0
        block_id, self._blocks[node] = self._blocks[node], _NO_BLOCK
        self._is_idle[node] = False
        self.num_idle -= 1
        parent = self._edge_of[node][0]
        self._num_device_children[parent] -= 1
        self._offer_for_eviction(parent)
        return block_id

    def _discard(self, node: int) -> None:
        self._blocks[node] = self._host_blocks[node] = _NO_BLOCK
        self._edge_of[node], self._is_idle[node] = (_NO_PARENT, ()), False
        self._generations[node] += 1
        self._free_nodes.append(node)

    def _offer_for_eviction(self, node: int) -> None:
        if self._is_evictable(node):
            self._device_leaves.push(node, self._last_use[node], self.num_idle)
        elif self._is_host_leaf(node):
            self._host_leaves.push(node, self._last_use[node], self.num_on_host)

    def _is_evictable(self, node: int, last_use: int | None = None) -> bool:
        return (
            self._is_idle[node]
            and self._num_device_children[node] == 0
            and self._num_pins[node] == 0
            and last_use in (None, self._last_use[node])
        )

    def _is_host_leaf(self, node: int, last_use: int | None = None) -> bool:
        return (
            self._host_blocks[node] != _NO_BLOCK
            and self._num_children[node] == 0
            and node not in self._protected
            and last_use in (None, self._last_use[node])
        )
