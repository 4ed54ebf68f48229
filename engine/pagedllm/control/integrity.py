"""Recounts what the prefix cache keeps count of; it alone looks into it."""

from __future__ import annotations

from collections.abc import Sequence

from .prefix_cache import NO_BLOCK, PrefixCache

__all__ = ["check_prefix_cache"]


def check_prefix_cache(cache: PrefixCache, ref_counts: Sequence[int]) -> dict[int, int]:
    """Verify the trie against the device pool's reference counts; returns ``{device block: node}``."""
    node_of_block: dict[int, int] = {}
    num_children, num_device_children = [0] * len(cache._blocks), [0] * len(cache._blocks)
    for edge, node in cache._edges.items():
        assert cache._edge_of[node] == edge, f"node {node} is filed under another edge"
        num_children[edge[0]] += 1
        assert (cache._blocks[node] == NO_BLOCK) == cache.is_on_host(node), f"node {node} is in two tiers or none"
        if cache.is_on_host(node):
            assert not cache._is_idle[node]
            assert cache._num_pins[node] == 0
            continue
        num_device_children[edge[0]] += 1
        assert edge[0] in cache._salts or not cache.is_on_host(edge[0]), "a device node below a host node"
        block_id = cache._blocks[node]
        assert block_id not in node_of_block, f"block {block_id} is in the trie twice"
        node_of_block[block_id] = node
        assert cache._is_idle[node] == (ref_counts[block_id] == 0), f"node {node}: idle flag is wrong"
    assert num_children == cache._num_children, "child counts are wrong"
    assert num_device_children == cache._num_device_children, "child counts on the device are wrong"
    device = list(node_of_block.values())
    pinned = [node for node in device if cache._num_pins[node] > 0]
    assert cache.num_idle == sum(cache._is_idle[node] for node in device)
    assert cache.num_pinned == len(pinned)
    assert cache.num_pinned_idle == sum(cache._is_idle[node] for node in pinned)
    assert cache.num_on_host == len(cache._edges) - len(device)
    assert all(num_children[root] > 0 for root in cache._roots.values()), "a root without children"
    cache._device_leaves.check_integrity(device)
    cache._host_leaves.check_integrity(node for node in cache._edges.values() if cache.is_on_host(node))
    return node_of_block
