"""A real server in a thread, and short ways to ask it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from pagedllm.api import Engine
from pagedllm.server.config import ServerConfig
from pagedllm.server.run import serving as in_thread

__all__ = ["Running", "events", "joined", "serving", "wait_until"]

TIMEOUT_S = 180.0  # of machines that do much else


@dataclass(frozen=True)
class Running:
    """A server that runs.

    Args:
        url: Its root, without a slash at the end.
        client: Bound to the root; without a key.
    """

    url: str
    server: Any
    client: httpx.Client

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    def complete(self, prompt: Any = "Hello", **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": prompt, **fields})

    def chat(self, content: Any = "Hello", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return self.client.post("/v1/chat/completions", json=body)


@contextlib.contextmanager
def serving(engine: Engine, **options: Any) -> Iterator[Running]:
    """Serve an engine on a free port until the block ends."""
    with in_thread(engine, ServerConfig(port=0, **{"shutdown_timeout_s": 2.0, **options})) as (url, server):
        wait_until(lambda: server.started)
        with httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
            yield Running(url, server, client)


def wait_until(condition: Callable[[], bool], seconds: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream as JSON; the last one must be the text ``[DONE]``."""
    lines = [line for line in response.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


def joined(items: list[Any], index: int = 0) -> str:
    """The text of one choice in a stream, of either API."""
    choices = [choice for item in items for choice in item["choices"] if choice["index"] == index]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
