"""Many clients at once."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.model]

NUM_STREAMS = 300
MAX_OPEN = 80  # 16 that run and 64 that wait


async def read_stream(client: httpx.AsyncClient, number: int) -> str:
    """How one stream ended: answered, refused, timed out; anything else is a fault."""
    body = {"prompt": f"Story {number}:", "max_tokens": 24, "ignore_eos": True, "temperature": 0, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code == 503:
            error = json.loads(await response.aread())["error"]
            assert "retry-after" in response.headers or error["code"] == "request_timeout"
            return str(error["code"])
        assert response.status_code == 200
        lines = [line async for line in response.aiter_lines() if line]
    if lines[-1] == "data: [DONE]":
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        return "answered"
    return str(json.loads(lines[-1].removeprefix("data: "))["error"]["code"])


async def watch_health(client: httpx.AsyncClient, delays: list[float], done: asyncio.Event) -> None:
    while not done.is_set():
        start = time.perf_counter()
        response = await client.get("/health")
        delays.append(time.perf_counter() - start)
        assert response.status_code == 200
        await asyncio.sleep(0.2)


async def flood(url: str) -> tuple[Counter[str], list[float]]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    delays: list[float] = []
    done = asyncio.Event()
    async with (
        httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as client,
        httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as health_client,
    ):
        watcher = asyncio.create_task(watch_health(health_client, delays, done))
        ends = await asyncio.gather(*(read_stream(client, number) for number in range(NUM_STREAMS)))
        done.set()
        await watcher
    return Counter(ends), delays


def test_300_streams(serve: Callable[..., Any], record_property: Callable[[str, object], None]) -> None:
    """Every stream ends with its answer, a refusal or its timeout; none hangs, nothing stays behind."""
    server = serve("--max-num-seqs", "16", "--max-open-requests", str(MAX_OPEN), "--request-timeout", "60")
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        asyncio.run(flood(server.url))  # takes the memory that the first use takes
        before = server.rss_bytes()
        ends, delays = asyncio.run(flood(server.url))
        stats = client.get("/v1/cache/stats").json()
        after = server.rss_bytes()
    record_property("ends", dict(ends))
    record_property("slowest_health_s", max(delays))
    record_property("memory_ratio", after / before)
    print(dict(ends), f"slowest health {max(delays):.3f} s, memory {after / before:.3f}")
    assert sum(ends.values()) == NUM_STREAMS
    assert set(ends) <= {"answered", "queue_full", "queue_timeout", "request_timeout"}
    assert ends["answered"] > 0
    assert (stats["num_running"], stats["num_waiting"], stats["num_referenced_blocks"]) == (0, 0, 0)
    assert after <= 1.05 * before
