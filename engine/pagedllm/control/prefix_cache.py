"""The prefix cache: an exact trie over full blocks of tokens, kept flat.

An edge is ``(parent node, tokens of one full block) -> node``; looking it up compares the tokens themselves, so two
prompts never meet by a hash collision. The tokens are packed into bytes: one object that keeps its hash, where a tuple
would have one more for each token, spread over memory. There are no node objects either: a node is an index into
parallel lists, and a hundred thousand of them give the garbage collector nothing to walk. One root per salt keeps
tenants apart.

A node's KV is in a block of the device's pool or of the host's. On every path device nodes come before host nodes: a
device node moves to the host only when none of its children is on the device, and comes back only after its parent.

A device node is *idle* when no sequence references its block, and *pinned* when a pin holds it or a node below it.
Idle nodes without children on the device that are not pinned can be evicted, least recently used first; as whoever
references a node references its ancestors too, all idle nodes that are not pinned become evictable in turn.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

from .kv_counters import KVCounters
from .kv_events import KVEventListener, KVEvents
from .leaf_queue import LeafQueue
from .watched_edges import Edge, WatchedEdges

__all__ = ["NO_BLOCK", "PrefixCache"]

_NO_PARENT = -1
NO_BLOCK = -1


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
        watched: What those who wait lack.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._pack = struct.Struct(f"{block_size}I").pack
        self.now = 0.0
        self.num_idle = self.num_pinned = self.num_pinned_idle = self.num_on_host = 0
        self._edges: dict[Edge, int] = {}
        self.watched = WatchedEdges()
        self._roots: dict[str | None, int] = {}
        self._salts: dict[int, str | None] = {}
        self._blocks: list[int] = []
        self._host_blocks: list[int] = []
        self._edge_of: list[Edge] = []
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

    def pack(self, tokens: Sequence[int]) -> bytes:
        """The tokens of one full block, as ``edge_below`` and ``insert`` take them."""
        return self._pack(*tokens)

    def match(
        self, token_ids: Sequence[int], salt: str | None, max_blocks: int, *, start: Sequence[int] = ()
    ) -> list[int]:
        """Nodes of the longest cached prefix, at most ``max_blocks`` of them, from ``start`` on, which is known."""
        nodes = list(start)
        node = nodes[-1] if nodes else self._roots.get(salt)
        if node is None:
            return nodes
        size, pack = self.block_size, self._pack
        for begin in range(len(nodes) * size, max_blocks * size, size):
            child = self._edges.get((node, pack(*token_ids[begin : begin + size])))
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def lacks(self, edge: Edge, nodes: Sequence[int], salt: str | None) -> bool:
        """Whether that edge below a match, whose nodes are still there, is not; a root may be a new one meanwhile."""
        return edge not in self._edges and (bool(nodes) or self._roots.get(salt) == edge[0])

    def edge_below(self, nodes: Sequence[int], salt: str | None, tokens: bytes) -> Edge | None:
        """Of a block below the last node of a match; None if the salt has no root yet."""
        parent = nodes[-1] if nodes else self._roots.get(salt)
        return None if parent is None else (parent, tokens)

    def block_of(self, node: int) -> int:
        """The device block; only of a device node."""
        assert self._blocks[node] != NO_BLOCK
        return self._blocks[node]

    def is_at(self, node: int, block_id: int) -> bool:
        """Whether the node's KV is in this device block."""
        return self._blocks[node] == block_id

    def host_block_of(self, node: int) -> int:
        assert self._host_blocks[node] != NO_BLOCK
        return self._host_blocks[node]

    def is_on_host(self, node: int) -> bool:
        return self._host_blocks[node] != NO_BLOCK

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
        if self._num_pins[node]:
            self.num_pinned_idle += 1
        elif self._num_device_children[node] == 0:
            self._device_leaves.push(node, self._clock, self.num_idle)

    def set_used(self, node: int) -> None:
        """The node's block is referenced again."""
        assert self._is_idle[node]
        self._is_idle[node] = False
        self.num_idle -= 1
        self.num_pinned_idle -= self._num_pins[node] > 0

    def pin(self, node: int) -> None:
        """Keep a device node, and with it its ancestors, from being evicted. Pins add up."""
        for item in self.path_to(node):
            assert self._blocks[item] != NO_BLOCK
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

    def root_of(self, salt: str | None) -> int:
        """Where the prefixes of a salt begin; whoever asks inserts something below it."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = self._new_node((_NO_PARENT, b""), NO_BLOCK)
            self._salts[root] = salt
            self.watched.epoch += 1  # nobody can have watched what is below it
        return root

    def insert(self, parent: int, tokens: bytes, block_id: int) -> int:
        """The node for a packed block below a device node or a root: a new one, referenced, unless it is there already.

        What is there keeps its own block.
        """
        node = self._edges.get(edge := (parent, tokens))
        if node is None:
            assert len(tokens) == 4 * self.block_size
            node = self._edges[edge] = self._new_node(edge, block_id)
            self._num_children[parent] += 1
            self._num_device_children[parent] += 1
            self.watched.note(edge, node)
        return node

    def listen(self, listener: KVEventListener) -> None:
        """Tell ``listener`` of every block that is there, and from now on of those that come and go."""
        self.watched.events = KVEvents(listener, self._edges, self._salts)

    def protect(self, nodes: Iterable[int]) -> None:
        """Keep these host nodes from being dropped, instead of those protected before."""
        released, self._protected = self._protected, frozenset(nodes)
        for node in released - self._protected:
            self._offer_for_eviction(node)

    def move_to_device(self, node: int, block_id: int) -> int:
        """Give a host node a device block, which is referenced; returns the host block that it leaves."""
        host_block = self.host_block_of(node)
        self._host_blocks[node], self._blocks[node] = NO_BLOCK, block_id
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
        parent, _ = edge = self._edge_of[node]
        del self._edges[edge]
        self._discard(node)
        self._num_children[parent] -= 1
        if was_on_host:
            self._offer_for_eviction(parent)
        self._discard_if_bare_root(parent)
        return block_id

    def drop_least_recent(self, num_blocks: int, counters: KVCounters) -> list[int]:
        """Forget that many device nodes, the least recently used leaf each time; returns their blocks.

        Only where no node is on the host, and the caller has checked ``num_evictable``.
        """
        is_idle, num_children, num_device_children = self._is_idle, self._num_children, self._num_device_children
        last_use, num_pins, now = self._last_use, self._num_pins, self.now
        blocks: list[int] = []
        age_s = idle_s = 0.0
        node: int | None = None
        while len(blocks) < num_blocks:
            node = self.least_recent_leaf() if node is None else node
            edge, used = self._edge_of[node], last_use[node]
            age_s += now - self._inserted_at[node]
            idle_s += now - self._idle_since[node]
            blocks.append(self._blocks[node])
            del self._edges[edge]
            self._discard(node)
            self.num_idle -= 1
            node, parent = None, edge[0]
            num_children[parent] -= 1
            num_device_children[parent] -= 1
            if not is_idle[parent]:
                self._discard_if_bare_root(parent)
            elif num_device_children[parent] == 0 and num_pins[parent] == 0:
                if last_use[parent] == used:
                    node = parent  # as old as its child, and nobody is older: it need not go through the queue
                else:
                    self._device_leaves.push(parent, last_use[parent], self.num_idle)
        if node is not None:
            self._device_leaves.push(node, last_use[node], self.num_idle)
        counters.count_evictions(len(blocks), age_s, idle_s)
        return blocks

    def clear(self) -> None:
        """Forget everything; whose blocks these were is the caller's to settle."""
        self.watched.clear()
        for node in (*self._edges.values(), *self._salts):
            self._discard(node)
        for counts in (self._num_children, self._num_device_children, self._num_pins):
            counts[:] = [0] * len(counts)
        for table in (self._edges, self._roots, self._salts):
            table.clear()
        self._device_leaves.clear()
        self._host_leaves.clear()
        self.num_idle = self.num_pinned = self.num_pinned_idle = self.num_on_host = 0

    def least_recent_leaf(self) -> int:
        """The device node to evict next. The caller has checked ``num_evictable``."""
        node = self._device_leaves.pop()
        assert node is not None
        return node

    def least_recent_host_leaf(self) -> int | None:
        """The host node to drop next; None if none may be."""
        return self._host_leaves.pop()

    def path_to(self, node: int) -> Iterator[int]:
        """The node and its ancestors."""
        while node not in self._salts:
            yield node
            node = self._edge_of[node][0]

    def _new_node(self, edge: Edge, block_id: int) -> int:
        if self._free_nodes:
            node = self._free_nodes.pop()
            self._blocks[node], self._edge_of[node], self._inserted_at[node] = block_id, edge, self.now
            return node
        for counts in (self._num_children, self._num_device_children, self._last_use, self._num_pins):
            counts.append(0)
        self._blocks.append(block_id)
        self._host_blocks.append(NO_BLOCK)
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
        block_id, self._blocks[node] = self._blocks[node], NO_BLOCK
        self._is_idle[node] = False
        self.num_idle -= 1
        parent = self._edge_of[node][0]
        self._num_device_children[parent] -= 1
        self._offer_for_eviction(parent)
        return block_id

    def _discard_if_bare_root(self, node: int) -> None:
        if self._num_children[node] == 0 and node in self._salts:
            del self._roots[self._salts.pop(node)]
            self._discard(node)

    def _discard(self, node: int) -> None:
        self._blocks[node] = self._host_blocks[node] = NO_BLOCK
        self._edge_of[node], self._is_idle[node] = (_NO_PARENT, b""), False
        self._generations[node] += 1
        self._free_nodes.append(node)
        self.watched.forget(node)

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
            self._host_blocks[node] != NO_BLOCK
            and self._num_children[node] == 0
            and node not in self._protected
            and last_use in (None, self._last_use[node])
        )
