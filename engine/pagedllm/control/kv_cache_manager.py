"""Which sequence owns which KV blocks: allocation on demand, prefix reuse, publication and release."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass

from .block_pool import BlockPool
from .prefix_cache import PrefixCache
from .sequence import Sequence

__all__ = ["KVCacheManager", "KVUsage"]


@dataclass(frozen=True, kw_only=True)
class KVUsage:
    """How the pool is used now; ``num_free + num_cached + num_referenced == num_blocks``."""

    num_blocks: int
    num_free: int
    num_cached: int
    num_referenced: int


class KVCacheManager:
    """Gives sequences the blocks that the next step writes, and keeps full ones for reuse.

    A block is written only by the sequence that allocated it, and published only when it is full and its KV has been
    computed. From then on nobody writes it, so any number of sequences may read it.

    Args:
        num_blocks: Size of the pool.
        block_size: Tokens per block.
        enable_prefix_caching: If False nothing is published, so nothing is ever matched.
    """

    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.prefix_cache = PrefixCache(block_size)
        self._node_of_block: dict[int, int] = {}
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def usage(self) -> KVUsage:
        num_free, num_cached = self.pool.num_free, self.prefix_cache.num_idle
        return KVUsage(
            num_blocks=self.pool.num_blocks,
            num_free=num_free,
            num_cached=num_cached,
            num_referenced=self.pool.num_blocks - num_free - num_cached,
        )

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_prefix(self, token_ids: TokenIds[int], salt: str | None) -> list[int]:
        """Cached nodes of the longest usable prefix. Changes nothing.

        At least one token is left to compute, because a step must yield logits; hence the ``- 1``.
        """
        return self.prefix_cache.match(token_ids, salt, (len(token_ids) - 1) // self.block_size)

    def admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its cached prefix, if all its known tokens fit beside what is running.

        Only the prefix's blocks are taken; the rest is allocated as steps need it. Asking for room for all of them
        avoids admitting a long prompt that would be preempted half-way.
        """
        assert not sequence.block_table
        nodes = [] if sequence.needs_all_prompt_logits else self.match_prefix(sequence.token_ids, sequence.salt)
        blocks = [self.prefix_cache.block_of(node) for node in nodes]
        shared = self._blocks_of_leader(sequence)
        if len(shared) > len(blocks):
            assert sequence.leader is not None
            blocks, nodes = shared, sequence.leader.nodes[: len(shared)]
        held = self._held_blocks(blocks, nodes)
        num_idle = sum(self.pool.ref_counts[block_id] == 0 for block_id in held)
        num_needed = self.num_blocks_for(sequence.num_tokens) - len(blocks)
        if num_needed > self.pool.num_free + self.prefix_cache.num_idle - num_idle:
            return False
        for block_id in held:
            self._acquire(block_id)
        sequence.nodes = nodes
        sequence.block_table = blocks
        sequence.num_computed_tokens = len(blocks) * self.block_size
        if sequence.num_cached_tokens is None:
            # What a preempted sequence finds again is its own earlier work, not reuse across requests.
            sequence.num_cached_tokens = sequence.num_computed_tokens
            if self.enable_prefix_caching and sequence.leader is None:
                self.prefix_queries += sequence.num_prompt_tokens
                self.prefix_hits += sequence.num_cached_tokens
        return True

    def allocate(self, sequence: Sequence, num_new_tokens: int) -> bool:
        """Extend the block table so that the next ``num_new_tokens`` have slots; False, changing nothing, if not."""
        num_blocks = self.num_blocks_for(sequence.num_computed_tokens + num_new_tokens) - len(sequence.block_table)
        if num_blocks > self.pool.num_free + self.prefix_cache.num_idle:
            return False
        for _ in range(num_blocks):
            if self.pool.num_free == 0:
                self._evict()
            sequence.block_table.append(self.pool.allocate())
        return True

    def publish(self, sequence: Sequence) -> None:
        """Offer the sequence's newly full blocks for reuse. Call it only after their KV has been written."""
        if not self.enable_prefix_caching or not sequence.publishes:
            return
        for i in range(len(sequence.nodes), sequence.num_computed_tokens // self.block_size):
            tokens = tuple(sequence.token_ids[i * self.block_size : (i + 1) * self.block_size])
            parent = sequence.nodes[-1] if sequence.nodes else None
            block_id = sequence.block_table[i]
            node = self.prefix_cache.publish(parent, sequence.salt, tokens, block_id)
            owner = self.prefix_cache.block_of(node)
            if owner == block_id:
                self._node_of_block[block_id] = node
            else:
                # Someone published the same tokens first. Our copy stays private, but the path to what we publish
                # next runs through that node, so we hold a reference that keeps it from being evicted.
                self._acquire(owner)
            sequence.nodes.append(node)

    def free(self, sequence: Sequence) -> None:
        """Take back all that the sequence holds; published blocks stay cached until their room is needed."""
        self.prefix_cache.tick()
        for block_id in self._held_blocks(sequence.block_table, sequence.nodes):
            self._release(block_id)
        sequence.block_table = []
        sequence.nodes = []
        sequence.num_computed_tokens = 0

    def reset_prefix_cache(self, running: Iterable[Sequence]) -> None:
        """Forget all cached prefixes. Running sequences keep their blocks, but no longer share new ones."""
        while self.prefix_cache.num_idle:
            self._evict()
        for sequence in running:
            for block_id, node in zip(sequence.block_table, sequence.nodes, strict=False):
                owner = self.prefix_cache.block_of(node)
                if owner != block_id and self.pool.release(owner):
                    self.pool.recycle(owner)
            sequence.nodes = []
            sequence.publishes = False
        self._node_of_block.clear()
        self.prefix_cache = PrefixCache(self.block_size)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Recount everything from the running sequences; raises AssertionError on any disagreement."""
        ref_counts = [0] * self.pool.num_blocks
        for sequence in running:
            assert len(sequence.block_table) * self.block_size >= sequence.num_computed_tokens
            assert len(set(sequence.block_table)) == len(sequence.block_table), "a block twice in one table"
            for block_id in self._held_blocks(sequence.block_table, sequence.nodes):
                ref_counts[block_id] += 1
        assert ref_counts == self.pool.ref_counts, "reference counts do not match the block tables"
        node_of_block = self.prefix_cache.check_integrity(ref_counts)
        assert node_of_block == self._node_of_block, "block to node map is wrong"
        free_ids = set(self.pool.free_ids)
        assert len(free_ids) == self.pool.num_free, "a block is free twice"
        for block_id, count in enumerate(ref_counts):
            kinds = (block_id in free_ids) + (count == 0 and block_id in node_of_block) + (count > 0)
            assert kinds == 1, f"block {block_id} is not exactly one of free, cached and referenced"

    def _blocks_of_leader(self, sequence: Sequence) -> list[int]:
        """The full prompt blocks that another choice of the request has computed.

        The partial block at the prompt's end is not copied: computing its few tokens again costs less than an
        operation of its own, and takes the same one block.
        """
        leader = sequence.leader
        if leader is None or not leader.is_prompt_computed or sequence.needs_all_prompt_logits:
            return []
        return leader.block_table[: (sequence.num_prompt_tokens - 1) // self.block_size]

    def _held_blocks(self, block_table: list[int], nodes: list[int]) -> list[int]:
        """Blocks that such a sequence references, last position first, so that leaves go idle before their parents."""
        held = list(block_table)
        for block_id, node in zip(block_table, nodes, strict=False):
            owner = self.prefix_cache.block_of(node)
            if owner != block_id:
                held.append(owner)
        held.reverse()
        return held

    def _acquire(self, block_id: int) -> None:
        if self.pool.ref_counts[block_id] == 0:
            self.prefix_cache.set_used(self._node_of_block[block_id])
        self.pool.acquire(block_id)

    def _release(self, block_id: int) -> None:
        if not self.pool.release(block_id):
            return
        node = self._node_of_block.get(block_id)
        if node is None:
            self.pool.recycle(block_id)
        else:
            self.prefix_cache.set_idle(node)

    def _evict(self) -> None:
        block_id = self.prefix_cache.evict()
        del self._node_of_block[block_id]
        self.pool.recycle(block_id)
