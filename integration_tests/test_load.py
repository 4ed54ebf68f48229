"""Many clients at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.model]

NUM_STREAMS = 300
MAX_WAITING = 64


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


# In a process of its own: in the clients' it would measure how busy they are. Ends when its standard input does.
HEALTH_WATCHER = """
import http.client, json, select, sys, time
host, delays = sys.argv[1], []
while not select.select([sys.stdin], [], [], 0.1)[0]:
    start = time.perf_counter()
    connection = http.client.HTTPConnection(host, timeout=30)
    connection.request("GET", "/health")
    response = connection.getresponse()
    response.read()
    connection.close()
    delays.append(time.perf_counter() - start)
    assert response.status == 200
print(json.dumps(delays))
"""


@contextlib.contextmanager
def watching_health(url: str, delays: list[float]) -> Iterator[None]:
    command = [sys.executable, "-c", HEALTH_WATCHER, url.removeprefix("http://")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        yield
        output, _ = watcher.communicate()
    delays += json.loads(output)


async def flood(url: str) -> Counter[str]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as client:
        return Counter(await asyncio.gather(*(read_stream(client, number) for number in range(NUM_STREAMS))))


def test_300_streams(serve: Callable[..., Any], record_property: Callable[[str, object], None]) -> None:
    """Every stream ends with its answer, a refusal or its timeout; none hangs, nothing stays behind."""
    server = serve("--max-num-seqs", "16", "--max-num-queued-reqs", str(MAX_WAITING), "--request-timeout", "60")
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        asyncio.run(flood(server.url))  # takes the memory that the first use takes
        before = server.rss_bytes()
        delays: list[float] = []
        with watching_health(server.url, delays):
            ends = asyncio.run(flood(server.url))
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
