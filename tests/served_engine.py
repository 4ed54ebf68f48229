"""An engine behind a URL, for tests: our server in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pagedllm.api import Engine
from pagedllm.server.config import ServerConfig
from pagedllm.server.run import Server

__all__ = ["served"]


@contextmanager
def served(engine: Engine, **options: Any) -> Iterator[str]:
    """Serve an engine on a free port; gives the base URL of its API."""
    server = Server(engine, ServerConfig(port=0, **{"shutdown_timeout_s": 0.2, **options}))
    url = server.bind()
    thread = threading.Thread(target=server.run_until_signal, name="test-server")
    thread.start()
    try:
        yield f"{url}/v1"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
