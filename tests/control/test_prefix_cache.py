"""The trie of full blocks: exact matches, isolation by salt, eviction order."""

from __future__ import annotations

from pagedllm.control.kv_counters import KVCounters
from pagedllm.control.prefix_cache import PrefixCache


def fill(cache: PrefixCache, tokens: list[int], first_block: int, salt: str | None = None) -> list[int]:
    nodes, size = [cache.root_of(salt)], cache.block_size
    for number, start in enumerate(range(0, len(tokens), size)):
        packed = cache.pack(tokens[start : start + size])
        nodes.append(cache.insert(nodes[-1], packed, first_block + number))
    return nodes[1:]


def set_idle(cache: PrefixCache, nodes: list[int]) -> None:
    cache.tick()
    for node in reversed(nodes):
        cache.set_idle(node)


def evict(cache: PrefixCache) -> int:
    return cache.drop(cache.least_recent_leaf())


def test_matches_the_longest_prefix_of_full_blocks():
    cache = PrefixCache(2)
    nodes = fill(cache, [1, 2, 3, 4, 5, 6], first_block=0)
    assert cache.match([1, 2, 3, 4, 7, 8], None, max_blocks=3) == nodes[:2]
    assert cache.match([1, 2, 3, 4, 5, 6], None, max_blocks=2) == nodes[:2]
    assert cache.match([2, 1, 3, 4], None, max_blocks=2) == []


def test_an_edge_needs_the_same_prefix_not_only_the_same_block():
    """A block's KV depends on all tokens before it: equal blocks after different prefixes must not be shared."""
    cache = PrefixCache(2)
    fill(cache, [1, 2, 9, 9], first_block=0)
    fill(cache, [3, 4, 8, 8], first_block=2)
    assert len(cache.match([3, 4, 9, 9], None, max_blocks=2)) == 1


def test_a_salt_separates_everything_below_it():
    cache = PrefixCache(2)
    fill(cache, [1, 2], first_block=0, salt="a")
    assert cache.match([1, 2], "b", 1) == []
    assert cache.match([1, 2], None, 1) == []
    assert len(cache.match([1, 2], "a", 1)) == 1


def test_evicts_the_least_recently_used_leaf_and_then_its_parent():
    cache = PrefixCache(1)
    old = fill(cache, [1, 2], first_block=0)
    new = fill(cache, [3, 4], first_block=2)
    set_idle(cache, old)
    set_idle(cache, new)
    assert [evict(cache) for _ in range(4)] == [1, 0, 3, 2]
    assert cache.num_idle == 0
    assert len(cache) == 0


def test_many_are_dropped_in_the_order_in_which_one_after_the_other_would_be():
    """A branch that was used later must outlive one that was used before, although they share their beginning."""
    cache = PrefixCache(1)
    old = fill(cache, [1, 2, 3], first_block=0)
    new = cache.insert(old[0], cache.pack([4]), 3)
    other = fill(cache, [5], first_block=4, salt="a")
    set_idle(cache, old[1:])
    set_idle(cache, other)
    set_idle(cache, [old[0], new])
    counters = KVCounters()
    assert cache.drop_least_recent(1, counters) == [2]
    assert cache.drop_least_recent(3, counters) == [1, 4, 3]
    assert counters.num_evictions == 4
    assert cache.match([5], "a", 1) == []
    assert cache.match([1], None, 1) == old[:1]
    assert cache.drop_least_recent(1, counters) == [0]
    assert (len(cache), cache.num_idle) == (0, 0)


def test_a_parent_used_later_than_its_child_is_evicted_later():
    """A leaf's parent joins the order by its own last use; putting it at either end would evict the wrong block."""
    cache = PrefixCache(1)
    chain = fill(cache, [1, 2], first_block=0)
    other = fill(cache, [3], first_block=2)
    set_idle(cache, chain)
    set_idle(cache, other)
    cache.set_used(chain[0])
    cache.tick()
    cache.set_idle(chain[0])
    assert [evict(cache) for _ in range(3)] == [1, 2, 0]


def test_a_used_leaf_is_not_evicted():
    cache = PrefixCache(1)
    first, second = fill(cache, [1], 0), fill(cache, [2], 1)
    set_idle(cache, first)
    set_idle(cache, second)
    cache.set_used(first[0])
    assert evict(cache) == 1
    assert cache.num_idle == 0


def test_roots_of_gone_salts_are_forgotten():
    """A server sees any number of tenants; what remains of one whose blocks are gone must be nothing."""
    cache = PrefixCache(1)
    for i in range(100):
        set_idle(cache, fill(cache, [1], first_block=0, salt=f"tenant {i}"))
        evict(cache)
    assert len(cache._roots) == 0
    assert len(cache._blocks) <= 2


def test_the_heap_of_leaves_stays_small():
    """Entries go stale whenever a leaf is used again; they must not pile up over a long run."""
    cache = PrefixCache(1)
    nodes = fill(cache, [1], first_block=0)
    for _ in range(10_000):
        set_idle(cache, nodes)
        cache.set_used(nodes[0])
    assert len(cache._device_leaves) < 3000
