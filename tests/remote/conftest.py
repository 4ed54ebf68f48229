"""A server of scripts and an engine that talks to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from remote_ways import CHAT
from scripted_server import ScriptedServer

from pagedllm.remote import RemoteConfig, RemoteEngine


@pytest.fixture
def make() -> Iterator[Callable[..., tuple[ScriptedServer, RemoteEngine]]]:
    """A server of scripts and an engine that talks to it."""
    opened: list[Any] = []

    def make(script: Any, **options: Any) -> tuple[ScriptedServer, RemoteEngine]:
        server = ScriptedServer({CHAT: script}).__enter__()
        engine = RemoteEngine(RemoteConfig(base_url=server.url, **{"model": "m", **options}))
        opened.extend([engine, server])
        return server, engine

    yield make
    for each in opened:
        each.__exit__(None, None, None)
