"""The router's policy without Ray: where requests go, and that its accounts always add up."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pagedllm.cluster.prefix_index import PrefixIndex
from pagedllm.cluster.routing import PrefixRouting, ReplicaLoad, RouteQuery
from pagedllm.control.block_hash import block_hashes

SIZE = 16


def query(name: str, prompt: list[int], **fields: Any) -> RouteQuery:
    salt = fields.pop("salt", None)
    return RouteQuery(
        request_id=name, num_tokens=len(prompt), block_size=SIZE, chain=block_hashes(prompt, SIZE, salt), **fields
    )


def prompt_of(number: int, num_tokens: int = 1024) -> list[int]:
    return [number * 10_000 + index for index in range(num_tokens)]


def routing_over(num_replicas: int) -> PrefixRouting:
    routing = PrefixRouting()
    routing.set_replicas(f"r{index}" for index in range(num_replicas))
    return routing


def finish(routing: PrefixRouting, asked: RouteQuery, replica: str, as_of: int = 0) -> None:
    routing.acknowledge(replica, held=asked.chain, as_of=as_of, load=ReplicaLoad())
    routing.prefilled(asked.request_id)
    routing.release(asked.request_id)


# --- The index ---


def test_index_matches_from_the_beginning():
    index = PrefixIndex()
    for name in ("a", "b", "c"):
        index.add_replica(name)
    chain = block_hashes(prompt_of(1, 81), SIZE, None)
    index.store("a", chain)
    index.store("b", chain[:2])
    assert index.match(chain) == {"a": 5, "b": 2}
    assert index.match(chain[:1]) == {"a": 1, "b": 1}
    assert index.match([]) == {}
    assert index.match(chain[1:]) == {"a": 4, "b": 1}
    index.remove("a", chain[3:])
    assert index.match(chain) == {"a": 3, "b": 2}


def test_index_is_a_plain_account_of_sets():
    """Against sets, under random changes: bits of a replica that took over a dead one's slot must not be its."""
    rng, index = random.Random(3), PrefixIndex()
    model: dict[str, set[bytes]] = {}
    blocks = [bytes([number]) for number in range(40)]
    for step in range(3000):
        name = f"r{rng.randrange(70)}"
        some = rng.sample(blocks, 5)
        action = rng.random()
        if name not in model:
            index.add_replica(name)
            model[name] = set()
        elif action < 0.1:
            index.forget_replica(name)
            del model[name]
            continue
        if action < 0.6:
            index.store(name, some)
            model[name].update(some)
        elif action < 0.95:
            index.remove(name, some)
            model[name].difference_update(some)
        else:
            index.clear_replica(name)
            model[name].clear()
        if step % 50 == 0:
            for block in blocks:
                assert set(index.match([block])) == {key for key, held in model.items() if block in held}
    assert len(index) == len(set.union(*model.values()))


# --- Decisions ---


def test_goes_where_the_prefix_is():
    routing = routing_over(8)
    first = query("1", prompt_of(1))
    home = routing.choose(first).replicas[0]
    finish(routing, first, home)
    for number in range(2, 6):
        again = query(str(number), prompt_of(1))
        decision = routing.choose(again)
        assert decision.replicas[0] == home
        assert decision.num_matched_tokens == len(first.chain) * SIZE
        finish(routing, again, home)
    routing.check_integrity()


def test_salt_separates():
    """A tenant's cached prefix must not draw another's request, which would find nothing there."""
    routing = routing_over(4)
    mine = query("1", prompt_of(1), salt="mine")
    finish(routing, mine, routing.choose(mine).replicas[0])
    assert routing.choose(query("2", prompt_of(1), salt="yours")).num_matched_tokens == 0


def test_burst_with_a_new_prefix_stays_together():
    """Nothing is acknowledged yet, but the first one is going to store it: computing it on eight replicas is waste."""
    routing = routing_over(8)
    homes = {routing.choose(query(str(number), prompt_of(1))).replicas[0] for number in range(6)}
    assert len(homes) == 1
    routing.check_integrity()


def test_burst_without_a_prefix_is_spread():
    """Decisions that do not see each other herd on whoever looked least loaded before the burst."""
    routing = routing_over(8)
    counts: dict[str, int] = dict.fromkeys(routing.replicas, 0)
    for number in range(64):
        counts[routing.choose(query(str(number), prompt_of(number))).replicas[0]] += 1
    assert max(counts.values()) <= 12
    assert min(counts.values()) >= 4


def test_a_hot_prefix_spreads_when_its_home_is_busy():
    """Waiting behind a long queue takes longer than computing the prefix elsewhere."""
    routing = routing_over(2)
    hot = query("hot", prompt_of(1))
    home = routing.choose(hot).replicas[0]
    finish(routing, hot, home)
    routing.update(home, as_of=1, load=ReplicaLoad(num_queued_tokens=5000, num_running_tokens=5000))
    assert routing.choose(query("next", prompt_of(1))).replicas[0] != home


def test_promises_end_with_the_request():
    """A guess that outlives its request sends others after a prefix that nobody has."""
    routing = routing_over(4)
    asked = query("1", prompt_of(1))
    routing.choose(asked)
    assert routing.choose(query("2", prompt_of(1))).num_matched_tokens > 0
    routing.release("1")
    routing.release("2")
    assert routing.choose(query("3", prompt_of(1))).num_matched_tokens == 0
    routing.check_integrity()


def test_eviction_is_learnt():
    routing = routing_over(4)
    asked = query("1", prompt_of(1))
    home = routing.choose(asked).replicas[0]
    finish(routing, asked, home, as_of=10)
    routing.update(home, as_of=11, removed=asked.chain[1:])
    assert routing.choose(query("2", prompt_of(1))).num_matched_tokens == SIZE


def test_late_acknowledgement_does_not_bring_back_what_was_evicted():
    """It was true when it was sent; the eviction, which came by another way, is younger."""
    routing = routing_over(2)
    asked = query("1", prompt_of(1))
    home = routing.choose(asked).replicas[0]
    routing.update(home, as_of=12, removed=asked.chain)
    finish(routing, asked, home, as_of=10)
    assert routing.num_blocks == 0


def test_snapshot_replaces_everything():
    routing = routing_over(1)
    old, new = query("1", prompt_of(1)), query("2", prompt_of(2))
    routing.update("r0", as_of=5, stored=old.chain)
    routing.update("r0", as_of=90, stored=new.chain, is_snapshot=True)
    assert routing.choose(old).num_matched_tokens == 0
    assert routing.choose(new).num_matched_tokens > 0


def test_dead_replica_is_forgotten_at_once():
    """With all that it held and all that was on its way there; a new one of its name begins with nothing."""
    routing = routing_over(3)
    asked = query("1", prompt_of(1))
    home = routing.choose(asked).replicas[0]
    routing.acknowledge(home, held=asked.chain, as_of=3, load=ReplicaLoad())
    routing.forget(home)
    routing.check_integrity()
    assert home not in routing.replicas
    assert routing.num_blocks == 0
    assert home not in routing.choose(query("2", prompt_of(1))).replicas
    routing.update(home, as_of=4, stored=asked.chain)  # was on its way
    routing.prefilled("1")
    routing.release("1")
    assert routing.num_blocks == 0
    routing.set_replicas(["r0", "r1", "r2"])
    assert routing.running_tokens()[home] == 0
    routing.check_integrity()


def test_excluded_replicas_get_nothing():
    """A retry must go elsewhere, even to where nothing is cached; and nowhere if there is no other."""
    routing = routing_over(2)
    asked = query("1", prompt_of(1))
    home = routing.choose(asked).replicas[0]
    finish(routing, asked, home)
    assert home not in routing.choose(query("2", prompt_of(1), excluded=frozenset({home}))).replicas
    assert routing.choose(query("3", prompt_of(1), excluded=frozenset({"r0", "r1"}))).replicas == ()
    routing.release("2")
    routing.check_integrity()


def test_affinity_keeps_a_conversation_together():
    """Prompts that share no full block yet, under one key: the second would else go anywhere."""
    routing = routing_over(16)
    homes = set()
    for number in range(12):
        asked = query(f"q{number}", prompt_of(number, 10), affinity="conversation")
        homes.add(routing.choose(asked).replicas[0])
        routing.release(asked.request_id)
    assert len(homes) == 1
    others = {
        routing.choose(query(f"o{number}", prompt_of(number, 10), affinity=f"key {number}")).replicas[0]
        for number in range(40)
    }
    assert len(others) > 6


def test_moved_reservation_counts_where_the_request_is():
    routing = routing_over(2)
    asked = query("1", prompt_of(1))
    home = routing.choose(asked).replicas[0]
    (other,) = {"r0", "r1"} - {home}
    routing.moved("1", other)
    routing.check_integrity()
    assert routing.running_tokens() == {home: 0, other: 1024}


def test_accounts_add_up_under_random_traffic():
    rng, routing = random.Random(11), PrefixRouting()
    names = [f"r{index}" for index in range(9)]
    routing.set_replicas(names)
    open_requests: list[str] = []
    for step in range(2000):
        action = rng.random()
        if action < 0.5:
            name = f"q{rng.randrange(400)}"
            routing.choose(query(name, prompt_of(rng.randrange(12), rng.randrange(1, 200))))
            open_requests.append(name)
        elif action < 0.7 and open_requests:
            routing.prefilled(rng.choice(open_requests))
        elif action < 0.9 and open_requests:
            routing.release(open_requests.pop(rng.randrange(len(open_requests))))
        elif action < 0.93:
            routing.forget(rng.choice(names))
        elif action < 0.97:
            routing.set_replicas(names)
        elif open_requests:
            routing.moved(rng.choice(open_requests), rng.choice(names))
        if step % 10 == 0:
            routing.check_integrity()
    for name in open_requests:
        routing.release(name)
    routing.check_integrity()
    assert set(routing.running_tokens().values()) <= {0}


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_few_replicas(num_replicas: int) -> None:
    routing = routing_over(num_replicas)
    assert len(routing.choose(query("1", prompt_of(1))).replicas) == num_replicas
    assert PrefixRouting().choose(query("1", prompt_of(1))).replicas == ()
