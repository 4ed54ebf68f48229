"""What the prefix cache tells of itself: it must be what the cache holds, whoever listens from when on."""

from __future__ import annotations

import random

from control_helpers import make_scheduler, make_sequence, run_step, run_until_idle

from pagedllm.control.block_hash import block_hashes
from pagedllm.control.kv_events import KVEvent
from pagedllm.control.scheduler import Scheduler


class Held:
    """The set of blocks that events make, and nothing else."""

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()

    def __call__(self, event: KVEvent) -> None:
        if event.kind == "stored":
            assert event.block_hash not in self.hashes, "stored twice"
            self.hashes.add(event.block_hash)
        elif event.kind == "removed":
            self.hashes.remove(event.block_hash)
        else:
            self.hashes.clear()


def hashes_of(scheduler: Scheduler) -> set[bytes]:
    """Told anew to somebody who has just come."""
    late = Held()
    scheduler.kv_cache_manager.prefix_cache.listen(late)
    return late.hashes


def test_chain_depends_on_everything_before():
    """A router that takes another prefix, or another's salt, for the same sends requests where nothing is cached."""
    prompt = list(range(17))
    chain = block_hashes(prompt, 4, None)
    assert len(chain) == 4
    assert block_hashes(prompt[:16], 4, None) == chain[:3], "the last token is always computed"
    assert block_hashes([99, *prompt[1:]], 4, None)[3] != chain[3]
    assert not set(block_hashes(prompt, 4, "salt")) & set(chain)
    assert not set(block_hashes(prompt, 4, "")) & set(chain)
    # On another machine, in another process and version: what is written here must not change.
    assert chain[0].hex() == "336b083cefb19a4db93a50b0c61f8711"


def test_events_are_what_the_cache_holds():
    """Under random load, with evictions, host tier and resets: the account of a listener equals the cache."""
    rng = random.Random(5)
    scheduler = make_scheduler(num_blocks=12, block_size=2, num_host_blocks=6)
    held = Held()
    cache = scheduler.kv_cache_manager.prefix_cache
    cache.listen(held)
    num_events = 0
    for step in range(400):
        if rng.random() < 0.5:
            salt = rng.choice([None, "a"])
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 12))]
            scheduler.add([make_sequence(prompt, max_tokens=rng.randrange(1, 4), salt=salt)])
        if scheduler.has_work:
            run_step(scheduler)
        if step % 97 == 96:
            scheduler.kv_cache_manager.reset_prefix_cache(scheduler.running)
        assert len(held.hashes) == len(cache)
        num_events += len(held.hashes)
    assert num_events > 1000
    assert hashes_of(scheduler) == held.hashes


def test_stored_blocks_have_the_names_that_a_router_computes():
    scheduler = make_scheduler(num_blocks=16, block_size=4)
    held = Held()
    scheduler.kv_cache_manager.prefix_cache.listen(held)
    prompt = list(range(30, 43))
    scheduler.add([make_sequence(prompt, max_tokens=2, salt="tenant")])
    run_until_idle(scheduler)
    assert set(block_hashes(prompt, 4, "tenant")) == held.hashes
    assert len(held.hashes) == 3
