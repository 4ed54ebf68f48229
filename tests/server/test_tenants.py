"""Two keys on one server know nothing of each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from server_helpers import Running, serving, wait_until

from pagedllm.server.auth import ApiKey, KeyRing

ALICE, BOB, ROOT = (
    ApiKey(name="alice", secret="secret-of-alice"),
    ApiKey(name="bob", secret="secret-of-bob"),
    ApiKey(name="root", secret="secret-of-root", is_admin=True),
)
KEYS = (ALICE, BOB, ROOT)
PROMPT = "The same long prompt of both. " * 4


@pytest.fixture
def shared(fake: FakeEngine) -> Iterator[Running]:
    with serving(fake, api_keys=KEYS) as running:
        yield running


def ask(running: Running, key: ApiKey, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key.secret}"}
    if path in ("/metrics", "/v1/cache/stats"):
        return running.client.get(path, headers=headers)
    body = {} if path == "/v1/cache/reset" else {"prompt": PROMPT, "max_tokens": 4, **fields}
    if path.startswith("/v1/cache"):
        body.pop("max_tokens", None)
    return running.client.post(path, json=body, headers=headers)


def cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_no_shared_prefix(shared: Running, fake: FakeEngine) -> None:
    """A hit would tell one tenant what another has sent; the engine's own counters must know of none."""
    assert cached(ask(shared, ALICE)) == 0
    assert cached(ask(shared, ALICE)) > 0
    hits = fake.stats().prefix_hits
    for salt in ({}, {"cache_salt": "x"}):
        assert cached(ask(shared, BOB, **salt)) == 0
        assert ask(shared, BOB, "/v1/cache/match", cache_salt="other").json() == {"num_tokens": 0}
    assert fake.stats().prefix_hits == hits
    # Nor by a salt that looks like the other's.
    for salt_seen in {request.hints.salt for request in fake.requests}:
        assert cached(ask(shared, BOB, cache_salt=salt_seen)) == 0


def test_salts_of_one_key(shared: Running) -> None:
    """The key's salt is added to the client's, not put in its place."""
    assert cached(ask(shared, ALICE, cache_salt="a")) == 0
    assert cached(ask(shared, ALICE, cache_salt="b")) == 0
    assert cached(ask(shared, ALICE)) == 0
    assert cached(ask(shared, ALICE, cache_salt="a")) > 0


def test_sharing_is_a_choice(fake: FakeEngine) -> None:
    with serving(fake, api_keys=KEYS, share_cache=True) as running:
        assert cached(ask(running, ALICE)) == 0
        assert cached(ask(running, BOB)) > 0


def test_only_admins(shared: Running, fake: FakeEngine) -> None:
    """One tenant must not flush, overtake or read the others."""
    ask(shared, ALICE)
    for path in ("/v1/cache/reset", "/metrics"):
        assert ask(shared, BOB, path).status_code == 403
    assert ask(shared, BOB, priority=-1).status_code == 403
    assert cached(ask(shared, ALICE)) > 0
    assert ask(shared, ROOT, priority=-1).status_code == 200
    assert ask(shared, ROOT, "/metrics").status_code == 200
    figures = ask(shared, BOB, "/v1/cache/stats").json()
    assert set(figures) == {"tenant"}
    assert figures["tenant"]["prompt_tokens"] == 0
    everybody = ask(shared, ROOT, "/v1/cache/stats").json()
    assert {item["name"]: item["num_requests"] for item in everybody["tenants"]} == {"alice": 2, "bob": 1, "root": 1}
    assert ask(shared, ROOT, "/v1/cache/reset").status_code == 200
    assert cached(ask(shared, ALICE)) == 0


def test_names_of_requests_and_prefixes_are_apart(shared: Running, fake: FakeEngine) -> None:
    """A tenant that guesses another's request_id or prompt_cache_key must not meet it."""
    for key in (ALICE, BOB):
        assert ask(shared, key, request_id="r1", prompt_cache_key="k").status_code == 200
    ids = [request.request_id for request in fake.requests]
    keys = [request.hints.prefix_key for request in fake.requests]
    assert len(set(ids)) == len(set(keys)) == 2
    assert "r1" not in ids
    assert "k" not in keys


def test_open_requests_of_a_key() -> None:
    """One tenant's flood is refused to it alone, with a time to come back."""
    engine = FakeEngine(delay_s=0.02)
    with serving(engine, api_keys=KEYS, max_open_requests_per_key=2) as running, ThreadPoolExecutor(2) as pool:
        body = {"max_tokens": 400, "ignore_eos": True}
        running_calls = [pool.submit(ask, running, ALICE, **body) for _ in range(2)]
        wait_until(lambda: engine.stats().num_running == 2)
        refused = ask(running, ALICE)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"]
        assert ask(running, BOB).status_code == 200
        assert [call.result().status_code for call in running_calls] == [200, 200]
        assert ask(running, ALICE).status_code == 200


def test_open_requests_of_all() -> None:
    engine = FakeEngine(delay_s=0.02)
    with serving(engine, max_open_requests=1) as running, ThreadPoolExecutor(1) as pool:
        first = pool.submit(running.complete, "a", max_tokens=200, ignore_eos=True)
        wait_until(lambda: engine.stats().num_running == 1)
        refused = running.complete("b")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert refused.headers["retry-after"]
        assert running.client.get("/health").status_code == 200
        assert first.result().status_code == 200


def test_pins_of_a_key(fake: FakeEngine) -> None:
    """A tenant over its budget is told so and gets its text; another may still pin."""
    retain = {"cache_hints": {"retain": [{"ttl_s": 60}]}}
    with serving(fake, api_keys=KEYS, max_pinned_tokens_per_key=200) as running:

        def outcome(key: ApiKey, prompt: str, **fields: Any) -> str:
            answer = ask(running, key, prompt=prompt, **retain, **fields)
            assert answer.status_code == 200
            return answer.json()["pagedllm"]["requests"][0]["hints"][0]["outcome"]

        assert outcome(ALICE, "a" * 150) == "accepted"
        assert outcome(ALICE, "b" * 150) == "rejected"
        assert not fake.requests[-1].hints.retain
        assert outcome(ALICE, "a" * 150) == "accepted", "renewing a pin takes no more room"
        assert outcome(BOB, "b" * 150) == "accepted"
        for prompt, expected in (("c" * 60, "rejected"), ("c" * 40, "accepted"), ("d" * 40, "rejected")):
            assert outcome(BOB, prompt, prompt_cache_key="one") == expected, (
                "one name for many prompts is no way around"
            )
        barrier = threading.Barrier(4)

        def together(number: int) -> str:
            barrier.wait()
            return outcome(ROOT, str(number) * 150)

        with ThreadPoolExecutor(4) as pool:
            assert sorted(pool.map(together, range(4))) == ["accepted"] + ["rejected"] * 3


def test_same_request_id_twice() -> None:
    """The second of two requests of one name is refused, so that an abort means one of them."""
    engine = FakeEngine(delay_s=0.02)
    with serving(engine) as running, ThreadPoolExecutor(1) as pool:
        first = pool.submit(running.complete, "a", max_tokens=100, ignore_eos=True, request_id="r")
        wait_until(lambda: engine.stats().num_running == 1)
        second = running.complete("b", request_id="r")
        assert (second.status_code, second.json()["error"]["param"]) == (400, "request_id")
        assert first.result().status_code == 200
        assert running.complete("b", request_id="r", max_tokens=2).status_code == 200


def test_ring_knows_only_its_keys() -> None:
    ring = KeyRing(KEYS)
    for key in KEYS:
        assert ring.find(f"Bearer {key.secret}") is key
        assert ring.find(f"bearer {key.secret}") is key
    for header in (
        None,
        "",
        "Bearer",
        "Bearer wrong",
        f"Basic {ALICE.secret}",
        ALICE.secret,
        f"Bearer {ALICE.secret}x",
    ):
        assert ring.find(header) is None
