"""Clients that vanish, bodies that are wrong, a worker that dies, a signal in mid-stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.model]

NUM_REQUESTS = 500
NUM_AT_ONCE = 40
BAD_BODIES: list[bytes] = [
    *(b"", b"{", b"[]", b"null", b'{"prompt": NaN}', b'{"prompt": ""}', b'{"prompt": [99999999]}', b"\xff" * 10),
    *(b'{"prompt": "a", "n": 999}', b'{"prompt": "a", "max_tokenz": 3}', b'{"prompt": "\\ud800"}', b"[" * 5000),
]
JSON = {"Content-Type": "application/json"}

# The command, with a way to kill its engine's worker from outside: SIGUSR1.
KILLABLE = """
import signal
from pagedllm import local
from pagedllm.cli import run
engines = []
original = local.LocalEngine.__init__
def remember(self, *args, **options):
    original(self, *args, **options)
    engines.append(self)
local.LocalEngine.__init__ = remember
def die(core):
    raise SystemExit("killed")
signal.signal(signal.SIGUSR1, lambda *_: engines[0]._worker.call(die))
run()
"""


async def one_request(client: httpx.AsyncClient, dice: random.Random) -> str:
    """Send one request of a random kind; how it ended."""
    kind = dice.choice(["whole", "stream", "leave", "leave", "bad"])
    body: dict[str, Any] = {"prompt": f"Tale {dice.random()}:", "max_tokens": dice.randint(1, 12), "temperature": 0}
    if kind == "bad":
        answer = await client.post("/v1/completions", content=dice.choice(BAD_BODIES), headers=JSON)
        assert answer.status_code == 400, answer.text
        return "bad"
    if kind == "leave":
        body |= {"max_tokens": 400, "ignore_eos": True, "stream": dice.random() < 0.5}
        with contextlib.suppress(httpx.ReadTimeout):
            await client.post("/v1/completions", json=body, timeout=httpx.Timeout(60, read=dice.uniform(0.01, 1.0)))
        return "left"
    answer = await client.post("/v1/completions", json=body | {"stream": kind == "stream"})
    if answer.status_code == 503:
        return str(answer.json()["error"]["code"])
    assert answer.status_code == 200, answer.text
    if kind == "whole":
        return str(answer.json()["choices"][0]["finish_reason"])
    last = answer.text.strip().rpartition("data: ")[2]
    return "streamed" if last == "[DONE]" else str(json.loads(last)["error"]["code"])


async def storm(url: str, seed: int, num_requests: int) -> Counter[str]:
    dice = random.Random(seed)
    gate = asyncio.Semaphore(NUM_AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:

        async def gated() -> str:
            async with gate:
                return await one_request(client, dice)

        return Counter(await asyncio.gather(*(gated() for _ in range(num_requests))))


def wait_for_rest(client: httpx.Client) -> None:
    deadline = time.monotonic() + 30
    names = ("num_running", "num_waiting", "num_referenced_blocks")
    while any((stats := client.get("/v1/cache/stats").json())[name] for name in names):
        assert time.monotonic() < deadline, stats
        time.sleep(0.1)


def test_faults_of_clients(serve: Callable[..., Any]) -> None:
    """500 requests of all kinds: each ends as it should, and nothing runs or is held afterwards."""
    server = serve("--max-num-seqs", "16")
    ends = asyncio.run(storm(server.url, 1, NUM_REQUESTS))
    print(dict(ends))
    assert sum(ends.values()) == NUM_REQUESTS
    assert set(ends) <= {"bad", "left", "stop", "length", "streamed"}
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        wait_for_rest(client)
        assert client.get("/health").status_code == 200
        metrics = client.get("/metrics").text
    assert 'reason="internal_error"' not in metrics


def test_worker_dies_under_load(serve: Callable[..., Any]) -> None:
    """Whoever waits gets an error, health says it, and what comes later is refused."""
    server = serve("--max-num-seqs", "16", program=KILLABLE)

    async def kill_in_the_middle() -> Counter[str]:
        task = asyncio.create_task(storm(server.url, 2, 120))
        await asyncio.sleep(3)
        server.process.send_signal(signal.SIGUSR1)
        return await task

    ends = asyncio.run(kill_in_the_middle())
    print(dict(ends))
    assert sum(ends.values()) == 120
    assert ends["engine_dead"] > 0
    assert set(ends) <= {"bad", "left", "stop", "length", "streamed", "engine_dead"}
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        deadline = time.monotonic() + 30
        while client.get("/health").status_code != 503:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 503
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0


def test_sigterm_in_mid_stream(serve: Callable[..., Any]) -> None:
    server = serve("--shutdown-timeout", "1")
    body = {"prompt": "Tale:", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_closed"
    assert server.process.wait(60) == 0
