"""Allocation on demand, sharing and release of KV blocks."""

from __future__ import annotations

import pytest
from control_helpers import make_sequence

from pagedllm.control.kv_cache_manager import KVCacheManager
from pagedllm.control.sequence import Sequence


def manager_of(num_blocks: int = 8, **options) -> KVCacheManager:
    return KVCacheManager(num_blocks=num_blocks, block_size=4, **options)


def compute(manager: KVCacheManager, sequence: Sequence) -> None:
    """Admit a sequence and compute all it has."""
    assert manager.admit(sequence)
    assert manager.allocate(sequence, sequence.num_uncomputed_tokens)
    sequence.num_computed_tokens = sequence.num_tokens
    manager.publish(sequence)


def test_blocks_are_allocated_as_tokens_need_them():
    manager = manager_of()
    sequence = make_sequence([1] * 9)
    manager.admit(sequence)
    assert manager.allocate(sequence, 4)
    assert len(sequence.block_table) == 1
    assert manager.allocate(sequence, 5)
    assert len(sequence.block_table) == 2


def test_a_failed_allocation_changes_nothing():
    manager = manager_of(num_blocks=2)
    sequence = make_sequence([1] * 4)
    compute(manager, sequence)
    before = (list(sequence.block_table), manager.usage)
    assert not manager.allocate(sequence, 5)
    assert (sequence.block_table, manager.usage) == before


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (16, 12), (17, 16)])
def test_at_least_one_prompt_token_is_left_to_compute(length: int, cached: int):
    """A prompt that is cached whole would leave a step without query tokens, hence without logits."""
    manager = manager_of(num_blocks=16)
    prompt = list(range(20))
    first = make_sequence(prompt)
    compute(manager, first)
    second = make_sequence(prompt[:length])
    assert manager.admit(second)
    assert second.num_computed_tokens == second.num_cached_tokens == cached
    assert second.block_table == first.block_table[: cached // 4]
    manager.check_integrity([first, second])


def test_a_block_is_shared_only_after_its_kv_is_written():
    """Two equal prompts in one cold batch: the second must not hit what the first has not computed yet."""
    manager = manager_of(num_blocks=16)
    first, second = make_sequence(list(range(9))), make_sequence(list(range(9)))
    for sequence in (first, second):
        assert manager.admit(sequence)
        assert manager.allocate(sequence, 9)
        assert sequence.num_computed_tokens == 0
    for sequence in (first, second):
        sequence.num_computed_tokens = 9
        manager.publish(sequence)
    # Each computed its own; one copy is kept.
    assert first.block_table[:2] == second.block_table[:2]
    assert manager.usage.num_referenced == 4
    manager.check_integrity([first, second])
    manager.free(first)
    manager.check_integrity([second])
    manager.free(second)
    manager.check_integrity([])
    assert manager.usage.num_cached == 2


def test_what_follows_a_block_that_another_published_is_published_too():
    """The continuation hangs below the first publisher's node, which must outlive the sequence that published it."""
    manager = manager_of(num_blocks=4)
    first, second = make_sequence([1, 2, 3, 4]), make_sequence([1, 2, 3, 4])
    for sequence in (first, second):
        manager.admit(sequence)
        manager.allocate(sequence, 4)
    for sequence in (first, second):
        sequence.num_computed_tokens = 4
        manager.publish(sequence)
    manager.free(first)
    second.token_ids += [5, 6, 7, 8]
    assert manager.allocate(second, 4)
    second.num_computed_tokens = 8
    manager.publish(second)
    manager.check_integrity([second])
    third = make_sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert manager.admit(third)
    assert third.num_cached_tokens == 8
    for sequence in (second, third):
        manager.free(sequence)
    manager.check_integrity([])


def test_cached_blocks_make_room_least_recent_first():
    manager = manager_of(num_blocks=4)
    old, new = make_sequence([1] * 5), make_sequence([2] * 5)
    for sequence in (old, new):
        compute(manager, sequence)
        manager.free(sequence)
    big = make_sequence([3] * 12)
    compute(manager, big)
    assert manager.match_prefix([1] * 5, None) == []
    assert len(manager.match_prefix([2] * 5, None)) == 1
    manager.check_integrity([big])


def test_admission_does_not_count_the_prefix_as_room():
    """The idle blocks of its own prefix cannot be evicted for the sequence that is about to use them."""
    manager = manager_of(num_blocks=3)
    first = make_sequence(list(range(9)))
    compute(manager, first)
    manager.free(first)
    second = make_sequence([*range(8), 50, 51, 52, 53, 54])
    assert not manager.admit(second)
    assert second.block_table == []
    manager.check_integrity([], [second])


def test_what_is_remembered_of_a_match_does_not_outlive_its_root():
    """Once all prefixes of a salt were evicted the next ones have another root, below which nobody watched."""
    manager = manager_of(num_blocks=4)
    waiting = make_sequence([1, 2, 3, 4, 5])
    first, filling, last = (make_sequence(prompt) for prompt in ([9] * 5, [8] * 3, [1, 2, 3, 4, 9]))
    compute(manager, first)
    manager.free(first)
    assert manager.look_up(waiting) == []
    assert manager.allocate(filling, 16)
    manager.free(filling)
    assert manager.usage.num_cached == 0
    compute(manager, make_sequence([7] * 5, salt="takes the root's number"))
    compute(manager, last)
    assert len(manager.look_up(waiting)) == 1
    manager.free(waiting)
    manager.prefix_cache.watched.check_integrity([])


def test_matching_changes_nothing():
    manager = manager_of()
    first = make_sequence(list(range(9)))
    compute(manager, first)
    manager.free(first)
    before = manager.usage
    assert len(manager.match_prefix(list(range(9)), None)) == 2
    assert manager.usage == before
    assert manager.counters.prefix_queries == 9


def test_recompute_after_preemption_is_not_a_hit():
    """Counting a sequence's own earlier work as reuse would make a thrashing engine look well cached."""
    manager = manager_of()
    sequence = make_sequence(list(range(9)))
    compute(manager, sequence)
    manager.free(sequence)
    assert manager.admit(sequence)
    assert sequence.num_computed_tokens == 8
    assert sequence.num_cached_tokens == 0
    assert manager.counters.prefix_hits == 0


def test_without_prefix_caching_nothing_is_kept():
    manager = manager_of(enable_prefix_caching=False)
    sequence = make_sequence(list(range(9)))
    compute(manager, sequence)
    manager.free(sequence)
    assert manager.usage.num_free == 8
    assert manager.counters.prefix_queries == 0
    manager.check_integrity([])


def test_reset_forgets_idle_and_running_prefixes():
    """A reset that only drops idle blocks would go on serving what running sequences had published."""
    manager = manager_of(num_blocks=16)
    idle, first, copy = make_sequence([1] * 9), make_sequence([2] * 9), make_sequence([2] * 9)
    compute(manager, idle)
    manager.free(idle)
    for sequence in (first, copy):
        manager.admit(sequence)
        manager.allocate(sequence, 9)
    for sequence in (first, copy):
        sequence.num_computed_tokens = 9
        manager.publish(sequence)
    manager.free(first)
    manager.reset_prefix_cache([copy])
    manager.check_integrity([copy])
    copy.token_ids += [3, 3, 3]
    assert manager.allocate(copy, 3)
    copy.num_computed_tokens = 12
    manager.publish(copy)
    assert manager.match_prefix([1] * 9, None) == []
    assert manager.match_prefix([2] * 9, None) == []
    manager.free(copy)
    manager.check_integrity([])
    assert manager.usage.num_free == 16
