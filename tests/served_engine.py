"""An engine behind a URL, for tests: our server in a thread of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pagedllm.api import Engine
from pagedllm.server.config import ServerConfig
from pagedllm.server.run import serving

__all__ = ["served"]


@contextmanager
def served(engine: Engine, **options: Any) -> Iterator[str]:
    """Serve an engine on a free port; gives the base URL of its API."""
    with serving(engine, ServerConfig(port=0, **{"shutdown_timeout_s": 0.2, **options})) as (url, _):
        yield f"{url}/v1"
