"""Work for clients that have left ends."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from server_helpers import serving, wait_until

from pagedllm.config import EngineConfig
from pagedllm.local import LocalEngine
from pagedllm.server.app import create_app
from pagedllm.server.config import ServerConfig
from pagedllm.server.service import Service

LONG = {"prompt": "Hello", "max_tokens": 4000, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
def test_client_leaves(stream: bool) -> None:
    """Whether the client waits for an event or for the whole, its leaving must be noticed without sending."""
    engine = FakeEngine(delay_s=0.01)
    with serving(engine) as running, httpx.Client(base_url=running.url) as client:
        if stream:
            with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=LONG, timeout=0.3)
        wait_until(lambda: engine.stats().num_running == 0)
        assert engine.num_aborts == 1
        assert running.server.service.tenants.num_open == 0


def test_client_leaves_before_the_first_token() -> None:
    """A queued request sends nothing that could fail, so only the connection tells that nobody waits."""
    engine = FakeEngine(delay_s=5.0)
    with serving(engine) as running, httpx.Client(base_url=running.url) as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=LONG | {"stream": True}, timeout=0.3)
        wait_until(lambda: engine.stats().num_running == 0, seconds=3)


async def test_a_client_that_cannot_be_heard_any_more_is_gone() -> None:
    """Under Ray Serve receive() raises when the client has left; the request went on until its answer was whole."""
    engine = FakeEngine(delay_s=0.01)
    body = json.dumps(LONG).encode()
    heard = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if heard:
            return heard.pop()
        await asyncio.sleep(0.1)
        raise ConnectionError

    async def send(_: Any) -> None:
        raise AssertionError("nobody is there")

    service = Service(engine, ServerConfig())
    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    await asyncio.wait_for(create_app(service)(scope | {"root_path": "", "http_version": "1.1"}, receive, send), 5)
    assert engine.num_aborts == 1
    assert service.tenants.num_open == 0


def test_client_of_many_prompts_leaves() -> None:
    engine = FakeEngine(delay_s=0.01)
    with serving(engine) as running, httpx.Client(base_url=running.url) as client:
        body = LONG | {"prompt": ["a", "b", "c"], "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
        wait_until(lambda: engine.num_aborts == 3)


def test_queued_and_running_on_a_real_engine(tiny_model: object) -> None:
    """Of four clients on one slot, one leaves while it runs and two while they wait; the last must get its turn."""
    config = EngineConfig(model=tiny_model.path, dtype="float32", max_num_seqs=1)  # type: ignore[attr-defined]
    with LocalEngine(config) as engine, serving(engine) as running:
        room = engine.model_info().max_model_len - 8
        body = {"prompt": [5, 6, 7], "max_tokens": room, "ignore_eos": True}

        def ask(timeout: float) -> int:
            try:
                return httpx.post(f"{running.v1}/completions", json=body, timeout=timeout, trust_env=False).status_code
            except httpx.ReadTimeout:
                return 0

        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(ask, [0.05, 0.05, 0.05, 60]))
        assert answers[-1] == 200
        wait_until(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)
        assert engine.stats().num_referenced_blocks == 0


def test_client_that_does_not_read() -> None:
    """A client that stops reading would hold its request for ever."""
    engine = FakeEngine(chunk_size=2000, max_model_len=10_000_000)
    with serving(engine, idle_timeout_s=0.3) as running:
        body = b'{"prompt": "Hello", "max_tokens": 9000000, "ignore_eos": true, "stream": true}'
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as lazy:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            lazy.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda: engine.stats().num_running == 1)
            wait_until(lambda: engine.stats().num_running == 0)
        assert engine.num_aborts == 1


def test_body_that_does_not_come() -> None:
    """A client that announces a body and sends none would hold its connection for ever."""
    with serving(FakeEngine(), idle_timeout_s=0.2) as running:
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as slow:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            slow.sendall(head + b"Content-Length: 100\r\n\r\n{")
            assert b"503" in slow.recv(4096)


@pytest.mark.parametrize("stream", [False, True])
def test_request_that_takes_too_long(stream: bool) -> None:
    """Its client gets an error, not silence: a status, or the stream's last event."""
    engine = FakeEngine(delay_s=0.02)
    with serving(engine, request_timeout_s=0.3) as running:
        start = time.monotonic()
        answer = running.client.post("/v1/completions", json=LONG | {"stream": stream})
        assert time.monotonic() - start < 20
        assert '"request_timeout"' in answer.text
        assert answer.status_code == (200 if stream else 503)
        assert "[DONE]" not in answer.text
        wait_until(lambda: engine.num_aborts == 1)
