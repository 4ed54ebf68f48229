"""What a replica tells who follows it: whoever applies it holds the same blocks, however late and seldom it asks."""

from __future__ import annotations

import random

from pagedllm.cluster.kv_log import KVLog, KVUpdate
from pagedllm.control.kv_events import KVEvent


def apply(held: set[bytes], update: KVUpdate) -> None:
    if update.is_snapshot:
        held.clear()
    held.difference_update(update.removed)
    held.update(update.stored)


def test_followers_hold_the_same():
    """Under random changes, a short memory and clearing: a follower that missed too much must get all anew."""
    rng, log = random.Random(1), KVLog(max_changes=16)
    truth: set[bytes] = set()
    followers: list[tuple[int | None, set[bytes]]] = [(None, set()) for _ in range(4)]
    num_snapshots = 0
    for _ in range(3000):
        block = bytes([rng.randrange(30)])
        if rng.random() < 0.01:
            log.record(KVEvent("cleared"))
            truth.clear()
        elif block in truth:
            log.record(KVEvent("removed", block))
            truth.remove(block)
        else:
            log.record(KVEvent("stored", block))
            truth.add(block)
        for place, (number, held) in enumerate(followers):
            if rng.random() < (0.5, 0.1, 0.05, 0.02)[place]:
                update = log.since(number)
                num_snapshots += update.is_snapshot
                apply(held, update)
                assert held == truth
                followers[place] = (update.as_of, held)
    assert 20 < num_snapshots < 600


def test_nothing_new_is_no_snapshot():
    log = KVLog()
    log.record(KVEvent("stored", b"a"))
    assert log.since(1) == KVUpdate(as_of=1)
    assert log.since(0) == KVUpdate(as_of=1, stored=(b"a",))


def test_a_number_of_a_log_before_gets_a_snapshot():
    """A replica of the same name that began anew counts from the beginning."""
    assert KVLog().since(70).is_snapshot


def test_num_held_counts_from_the_beginning():
    log = KVLog()
    for block in (b"a", b"c"):
        log.record(KVEvent("stored", block))
    assert log.num_held([b"a", b"b", b"c"]) == (1, 2)


def test_who_waits_is_told():
    told: list[int] = []
    log = KVLog(on_change=lambda: told.append(1))
    log.record(KVEvent("stored", b"a"))
    assert told == [1]
