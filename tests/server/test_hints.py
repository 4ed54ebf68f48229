"""Hints and overload, from HTTP down to the blocks of a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from server_helpers import Running, serving, wait_until

from pagedllm.config import EngineConfig
from pagedllm.local import LocalEngine

PROMPT = list(range(10, 80))


@pytest.fixture
def tiny(tiny_model: Any) -> Iterator[tuple[Running, LocalEngine]]:
    with tiny_model.engine(block_size=8) as engine, serving(engine) as running:
        yield running, engine


def outcomes(answer: httpx.Response) -> list[tuple[str, str, int]]:
    assert answer.status_code == 200, answer.text
    items = answer.json()["pagedllm"]["requests"][0]["hints"]
    return [(item["hint"], item["outcome"], item["num_tokens"]) for item in items]


def test_warm_then_match(tiny: tuple[Running, LocalEngine]) -> None:
    """What was warmed must be there for the request that follows, under the same salt only."""
    running, engine = tiny
    warmed = running.client.post("/v1/cache/warm", json={"prompt": PROMPT, "cache_salt": "s"})
    assert warmed.json()["usage"]["completion_tokens"] == 0
    assert outcomes(warmed)[0][:2] == ("warm", "accepted")
    match = running.client.post("/v1/cache/match", json={"prompt": PROMPT, "cache_salt": "s"}).json()
    assert match == {"num_tokens": 64}
    assert running.client.post("/v1/cache/match", json={"prompt": PROMPT}).json() == {"num_tokens": 0}
    answer = running.complete(PROMPT, max_tokens=2, cache_salt="s")
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    assert engine.stats().num_referenced_blocks == 0


def test_retain_and_release(tiny: tuple[Running, LocalEngine]) -> None:
    """A place named over HTTP must become pinned blocks, and a release must free them."""
    running, engine = tiny
    place = {"retain": [{"num_tokens": 40, "ttl_s": "1h"}]}
    retained = running.complete(PROMPT, max_tokens=1, prompt_cache_key="k", cache_hints=place)
    assert outcomes(retained) == [("retain", "accepted", 40)]
    assert engine.stats().num_pinned_blocks == 5
    figures = running.client.get("/v1/cache/stats").json()
    assert figures["num_pinned_blocks"] == 5
    assert figures["tenants"][0]["pinned_tokens"] == 40
    released = running.complete(PROMPT, max_tokens=1, prompt_cache_key="k", cache_hints={"release": True})
    assert outcomes(released)[0][:2] == ("release", "accepted")
    assert engine.stats().num_pinned_blocks == 0
    assert running.client.get("/v1/cache/stats").json()["tenants"][0]["pinned_tokens"] == 0


def test_hint_outcomes_are_counted(tiny: tuple[Running, LocalEngine]) -> None:
    running, _ = tiny
    running.client.post("/v1/cache/warm", json={"prompt": PROMPT})
    name = 'pagedllm:hint_outcomes_total{hint="warm",outcome="accepted"} 1.0'
    wait_until(lambda: name in running.client.get("/metrics").text)


@pytest.mark.parametrize(
    ("options", "code"), [({"max_num_queued_reqs": 1}, "queue_full"), ({"queue_timeout_s": 0.05}, "queue_timeout")]
)
def test_queue_of_the_engine(tiny_model: Any, options: dict[str, Any], code: str) -> None:
    """A full queue and a long wait end as 'try again later', not as an error of the request."""
    config = EngineConfig(model=tiny_model.path, dtype="float32", max_num_seqs=1, **options)
    with LocalEngine(config) as engine, serving(engine) as running, ThreadPoolExecutor(12) as pool:
        calls = [pool.submit(running.complete, [5, 6, 7], max_tokens=100, ignore_eos=True) for _ in range(12)]
        answers = [call.result() for call in calls]
    refused = [answer for answer in answers if answer.status_code == 503]
    assert refused
    assert {answer.json()["error"]["code"] for answer in refused} == {code}
    assert all(answer.headers["retry-after"] for answer in refused)
    assert {answer.status_code for answer in answers} == {200, 503}
