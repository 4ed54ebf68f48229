"""Which sequence owns which KV blocks: allocation on demand, prefix reuse, publication, swap and release."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass

from .block_pool import BlockPool
from .host_tier import HostTier
from .integrity import check_prefix_cache
from .kv_counters import KVCounters, KVUsage
from .pins import Pins
from .prefix_cache import PrefixCache
from .sequence import PrefixMatch, Sequence, SwappedBlocks

__all__ = ["KVCacheManager"]


_DROPPED_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class _Found:
    """Where a waiting sequence's KV can be had.

    Args:
        nodes: Its cached prefix, on the device and then on the host.
        shared: Or else: blocks of another choice of its request.
        num_swapped: How many of its swapped blocks, the last ones, go on from there.
        num_tokens: Tokens whose KV these hold.
    """

    nodes: tuple[int, ...]
    shared: tuple[int, ...]
    num_swapped: int
    num_tokens: int


class KVCacheManager:
    """Gives sequences the blocks that the next step writes, and keeps full ones for reuse.

    A block is written only by the sequence that holds it alone, and published only when it is full and its KV has been
    computed. From then on nobody writes it, so any number of sequences may read it. A choice shares its leader's
    partial last block only until its first own token, which copies it.

    Args:
        num_blocks: Size of the device's pool.
        block_size: Tokens per block.
        enable_prefix_caching: If False nothing is published, so nothing is ever matched.
        num_host_blocks: Size of the host's pool, for preempted sequences and for prefixes that left the device.
        max_pinned_fraction: Share of the device's pool that pins may hold.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        max_pinned_fraction: float = 0.5,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.host = HostTier(num_host_blocks)
        self.counters = KVCounters()
        self.prefix_cache = PrefixCache(block_size)
        self.pins = Pins(self.prefix_cache, int(num_blocks * max_pinned_fraction))
        self._node_of_block: dict[int, int] = {}

    @property
    def usage(self) -> KVUsage:
        cache, num_free = self.prefix_cache, self.pool.num_free
        return KVUsage(
            num_blocks=self.pool.num_blocks,
            num_free=num_free,
            num_cached=cache.num_idle,
            num_referenced=self.pool.num_blocks - num_free - cache.num_idle,
            num_pinned=cache.num_pinned,
            num_host_blocks=self.host.pool.num_blocks,
            num_host_free=self.host.pool.num_free,
            num_host_cached=cache.num_on_host,
        )

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now."""
        return self.pool.num_free + self.prefix_cache.num_evictable

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_prefix(self, token_ids: List[int], salt: str | None) -> list[int]:
        """Cached nodes of the longest usable prefix, in any tier. Changes nothing."""
        return self.prefix_cache.match(token_ids, salt, (len(token_ids) - 1) // self.block_size)

    def look_up(self, sequence: Sequence) -> list[int]:
        """As ``match_prefix``, remembering in the sequence what was found, so that the next time costs little."""
        cache, known = self.prefix_cache, sequence.match
        start: list[int] = []
        if known is not None and (not known.nodes or cache.generation_of(known.nodes[-1]) == known.generation):
            if known.epoch == cache.watched.epoch:
                return known.nodes
            if known.missing is not None and cache.lacks(known.missing, known.nodes, sequence.salt):
                known.epoch = cache.watched.epoch
                return known.nodes
            start = known.nodes
        self._forget_match(sequence)
        tokens, size = sequence.token_ids, self.block_size
        max_blocks = sequence.max_usable_prefix // size
        nodes, missing = cache.match(tokens, sequence.salt, max_blocks, start=start), None
        if len(nodes) < max_blocks:
            begin = len(nodes) * size
            missing = cache.edge_below(nodes, sequence.salt, cache.pack(tokens[begin : begin + size]))
        if missing is not None:
            cache.watched.watch(missing)
        generation = cache.generation_of(nodes[-1]) if nodes else 0
        sequence.match = PrefixMatch(nodes, generation, missing, cache.watched.epoch)
        return nodes

    def _forget_match(self, sequence: Sequence) -> None:
        if sequence.match is not None and sequence.match.missing is not None:
            self.prefix_cache.watched.unwatch(sequence.match.missing)
        sequence.match = None

    def admit(self, sequence: Sequence, num_reserved: int = 0) -> bool:
        """Give a waiting sequence what is there of its KV, if all its known tokens fit beside what is running.

        Only blocks that hold KV are taken; the rest is allocated as steps need it. Asking for room for all known
        tokens avoids admitting a long prompt that would be preempted half-way.

        Args:
            sequence: Holds no device blocks.
            num_reserved: Blocks to leave for others.
        """
        assert not sequence.block_table
        found = self._find(sequence)
        on_device = [node for node in found.nodes if not self.prefix_cache.is_on_host(node)]
        num_idle = sum(self.prefix_cache.is_idle(node) and not self.prefix_cache.is_pinned(node) for node in on_device)
        num_present = found.num_tokens // self.block_size if found.shared else len(on_device)
        num_needed = self.num_blocks_for(sequence.num_tokens) - num_present
        if num_needed + num_reserved > self.num_available - num_idle:
            return False
        self._take(sequence, found)
        self._forget_match(sequence)
        self._count_hit(sequence, num_host_tokens=(len(found.nodes) - len(on_device)) * self.block_size)
        return True

    def allocate(self, sequence: Sequence, num_new_tokens: int) -> bool:
        """Make the block table ready for the next ``num_new_tokens``; False, changing nothing, if there is no room.

        New blocks are appended. A shared block that would be written is replaced by a copy.
        """
        table, size = sequence.block_table, self.block_size
        first = sequence.num_computed_tokens // size
        is_shared = first < len(table) and self.pool.ref_counts[table[first]] > 1
        num_new = -(-(sequence.num_computed_tokens + num_new_tokens) // size) - len(table)
        if num_new + is_shared > self.num_available:
            return False
        if is_shared:
            source, table[first] = table[first], self._take_blocks(1)[0]
            self.host.copy_within_device(source, table[first])
            self.pool.release([source])
        table += self._take_blocks(num_new)
        sequence.num_writable_tokens = len(table) * size
        return True

    def publish(self, sequence: Sequence) -> None:
        """Offer the sequence's newly full blocks for reuse. Call it only after their KV has been written."""
        cache, size, nodes = self.prefix_cache, self.block_size, sequence.nodes
        num_nodes, num_full = len(nodes), sequence.num_computed_tokens // size
        if num_nodes == num_full or not self.enable_prefix_caching or not sequence.publishes:
            return
        parent = nodes[-1] if nodes else cache.root_of(sequence.salt)
        for i in range(num_nodes, num_full):
            block_id = sequence.block_table[i]
            parent = cache.insert(parent, cache.pack(sequence.token_ids[i * size : (i + 1) * size]), block_id)
            if cache.is_at(parent, block_id):
                self._node_of_block[block_id] = parent
                if (i + 1) * size <= sequence.num_prompt_tokens:
                    sequence.num_created_tokens += size
            else:
                self._use_published(sequence, i, parent)
            nodes.append(parent)

    def _use_published(self, sequence: Sequence, i: int, node: int) -> None:
        """Let the i-th block of a sequence be that of a node with the same tokens, which somebody published first."""
        cache, block_id = self.prefix_cache, sequence.block_table[i]
        if cache.is_on_host(node):
            self.host.free(cache.move_to_device(node, block_id))
            self._node_of_block[block_id] = node
        else:  # one copy is enough
            sequence.block_table[i] = cache.block_of(node)
            self._acquire(sequence.block_table[i])
            for released in self.pool.release([block_id]):
                self._retire(released)

    def free(self, sequence: Sequence, *, is_worth_keeping: bool = True) -> None:
        """Take back all that the sequence holds; published blocks stay cached until their room is needed.

        Args:
            sequence: What holds them.
            is_worth_keeping: Whether what was published may move to the host then, rather than be dropped.
        """
        self.prefix_cache.tick()
        # The last position first, so that leaves go idle before their parents.
        for block_id in self.pool.release(reversed(sequence.block_table)):
            self._retire(block_id, is_worth_keeping=is_worth_keeping)
        if sequence.swapped is not None:
            for host_block in sequence.swapped.host_blocks:
                self.host.free(host_block)
            sequence.swapped = None
        self._forget_match(sequence)
        sequence.block_table = []
        sequence.nodes = []
        sequence.num_computed_tokens = sequence.num_writable_tokens = 0

    def swap_out(self, sequence: Sequence) -> bool:
        """Free a running sequence's blocks such that its KV can come back; False, changing nothing, without room.

        What the prefix cache has of it stays there, and moves to the host when its room is needed; the rest is copied
        to host blocks of its own.
        """
        start = len(sequence.nodes)
        blocks = sequence.block_table[start : self.num_blocks_for(sequence.num_computed_tokens)]
        while self.host.pool.num_free < len(blocks):
            if not self._drop_host_leaf():
                return False
        host_blocks = tuple(self.host.copy_out(block_id) for block_id in blocks)
        num_tokens = sequence.num_computed_tokens
        self.free(sequence)
        sequence.swapped = SwappedBlocks(start, host_blocks, num_tokens)
        return True

    def reset_prefix_cache(self, running: Iterable[Sequence]) -> None:
        """Forget all cached prefixes, pinned ones too, in every tier.

        Running sequences keep their blocks, but share no new ones. Swapped ones keep what is theirs alone.
        """
        cache = self.prefix_cache
        for node in cache.nodes():
            if cache.is_on_host(node):
                self.host.free(cache.host_block_of(node))
            elif cache.is_idle(node):
                self.pool.recycle(cache.block_of(node))
        for sequence in running:
            sequence.nodes = []
            sequence.publishes = False
        self._node_of_block.clear()
        self.pins.clear()
        cache.clear()

    def check_integrity(self, running: Iterable[Sequence], waiting: Iterable[Sequence] = ()) -> None:
        """Recount everything from the sequences; raises AssertionError on any disagreement."""
        ref_counts = [0] * self.pool.num_blocks
        for sequence in running:
            assert sequence.swapped is None
            assert len(sequence.block_table) * self.block_size >= sequence.num_computed_tokens
            assert len(set(sequence.block_table)) == len(sequence.block_table), "a block twice in one table"
            assert sequence.block_table[: len(sequence.nodes)] == list(map(self.prefix_cache.block_of, sequence.nodes))
            for block_id in sequence.block_table:
                ref_counts[block_id] += 1
        assert ref_counts == self.pool.ref_counts, "reference counts do not match the block tables"
        node_of_block = check_prefix_cache(self.prefix_cache, ref_counts)
        assert node_of_block == self._node_of_block, "block to node map is wrong"
        free_ids = set(self.pool.free_ids)
        assert len(free_ids) == self.pool.num_free, "a block is free twice"
        for block_id, count in enumerate(ref_counts):
            kinds = (block_id in free_ids) + (count == 0 and block_id in node_of_block) + (count > 0)
            assert kinds == 1, f"block {block_id} is not exactly one of free, cached and referenced"
        self._check_host(waiting)
        self.pins.check_integrity()

    def _check_host(self, waiting: Iterable[Sequence]) -> None:
        cache = self.prefix_cache
        used = [cache.host_block_of(node) for node in cache.nodes() if cache.is_on_host(node)]
        watched = []
        for sequence in waiting:
            assert not sequence.block_table
            assert not sequence.nodes
            used.extend(() if sequence.swapped is None else sequence.swapped.host_blocks)
            if sequence.match is not None and sequence.match.missing is not None:
                watched.append(sequence.match.missing)
        cache.watched.check_integrity(watched)
        everything = sorted([*used, *self.host.pool.free_ids])
        assert everything == list(range(self.host.pool.num_blocks)), "a host block is lost or held twice"

    def _find(self, sequence: Sequence) -> _Found:
        """What is there of a waiting sequence's KV, in whichever place has the most of it."""
        nodes = tuple(self.look_up(sequence)) if sequence.max_usable_prefix else ()
        num_tokens, num_swapped, swapped = len(nodes) * self.block_size, 0, sequence.swapped
        if swapped is not None and len(nodes) >= swapped.start and swapped.num_tokens > num_tokens:
            num_swapped = swapped.start + len(swapped.host_blocks) - len(nodes)
            num_tokens = swapped.num_tokens
        leader = sequence.leader
        if leader is not None and leader.block_table and leader.is_prompt_computed:
            num_shared_tokens = sequence.num_prompt_tokens - 1
            if num_shared_tokens > num_tokens:
                shared = tuple(leader.block_table[: self.num_blocks_for(num_shared_tokens)])
                return _Found((), shared, 0, num_shared_tokens)
        return _Found(nodes, (), num_swapped, num_tokens)

    def _take(self, sequence: Sequence, found: _Found) -> None:
        cache = self.prefix_cache
        cache.protect(node for node in found.nodes if cache.is_on_host(node))
        # All that is there first, so that making room for the rest does not evict it.
        on_device = [node for node in found.nodes if not cache.is_on_host(node)]
        sequence.nodes = list(found.nodes)
        sequence.block_table = [*map(cache.block_of, on_device), *found.shared]
        if found.shared and sequence.leader is not None:
            num_full = found.num_tokens // self.block_size
            sequence.nodes = sequence.leader.nodes[:num_full]
            sequence.leader.num_writable_tokens = 0
        for block_id in sequence.block_table:
            self._acquire(block_id)
        for node in found.nodes[len(on_device) :]:
            block_id = self._take_blocks(1)[0]
            self.host.copy_in(cache.move_to_device(node, block_id), block_id)
            self._node_of_block[block_id] = node
            sequence.block_table.append(block_id)
        cache.protect(())
        if sequence.swapped is not None:
            host_blocks = sequence.swapped.host_blocks
            num_left = len(host_blocks) - found.num_swapped
            for host_block in host_blocks[:num_left]:
                self.host.free(host_block)
            for host_block in host_blocks[num_left:]:
                sequence.block_table += self._take_blocks(1)
                self.host.copy_in(host_block, sequence.block_table[-1])
            sequence.swapped = None
        sequence.num_computed_tokens = found.num_tokens

    def _count_hit(self, sequence: Sequence, *, num_host_tokens: int) -> None:
        if sequence.num_cached_tokens is not None:
            return  # what a preempted sequence finds again is its own earlier work, not reuse across requests
        sequence.num_cached_tokens = sequence.num_computed_tokens
        if self.enable_prefix_caching and sequence.leader is None:
            self.counters.prefix_queries += sequence.num_prompt_tokens
            self.counters.prefix_hits += sequence.num_cached_tokens
            self.counters.prefix_hits_on_host += num_host_tokens

    def _acquire(self, block_id: int) -> None:
        if self.pool.ref_counts[block_id] == 0:
            node = self._node_of_block[block_id]
            self.counters.count_reuse(self.prefix_cache.idle_time_of(node))
            self.prefix_cache.set_used(node)
        self.pool.acquire(block_id)

    def _retire(self, block_id: int, *, is_worth_keeping: bool = True) -> None:
        """Keep a block that nobody references any more for the prefix cache, or make it free."""
        node = self._node_of_block.get(block_id)
        if node is None:
            self.pool.recycle(block_id)
        else:
            self.prefix_cache.set_idle(node, is_worth_keeping=is_worth_keeping)

    def _take_blocks(self, num_blocks: int) -> list[int]:
        """Free blocks, or else those that have been unused longest."""
        num_missing = num_blocks - len(self.pool.free_ids)
        if num_missing > 0 and self.host.pool.num_blocks > 0:
            for _ in range(num_missing):
                self._evict()
        elif num_missing > 0:
            # Some more at once, out of very many, because the first costs more than those after it.
            num_dropped = max(num_missing, min(_DROPPED_AT_ONCE, self.prefix_cache.num_evictable // 128))
            for block_id in self.prefix_cache.drop_least_recent(num_dropped, self.counters):
                del self._node_of_block[block_id]
                self.pool.recycle(block_id)
        return self.pool.allocate(num_blocks)

    def _evict(self) -> None:
        """Free the device block that has been unused longest; its KV moves to the host if that has room."""
        cache = self.prefix_cache
        node = cache.least_recent_leaf()
        block_id = cache.block_of(node)
        self.counters.count_evictions(1, cache.age_of(node), cache.idle_time_of(node))
        if (cache.is_worth_keeping(node) or cache.must_keep(node)) and self._has_host_room():
            cache.move_to_host(node, self.host.copy_out(block_id))
        else:
            cache.drop(node)
        del self._node_of_block[block_id]
        self.pool.recycle(block_id)

    def _has_host_room(self) -> bool:
        return self.host.pool.num_free > 0 or self._drop_host_leaf()

    def _drop_host_leaf(self) -> bool:
        node = self.prefix_cache.least_recent_host_leaf()
        if node is None:
            return False
        self.host.free(self.prefix_cache.drop(node))
        return True
