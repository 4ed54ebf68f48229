"""Replicas on Ray Serve, for tests: started on this machine, ended without a trace."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from pagedllm.config import EngineConfig

__all__ = ["started"]


@contextlib.contextmanager
def started(config: EngineConfig, *, server: dict[str, Any], **cluster: Any) -> Iterator[Any]:
    """A ``ClusterServer`` of two engines that serves, and its URL; skips where Ray is not installed."""
    pytest.importorskip("ray")
    from pagedllm.cluster.config import ClusterConfig
    from pagedllm.server.config import ServerConfig

    options = {"port": 0, "shutdown_timeout_s": 2.0} | server
    cluster_config = ClusterConfig(**{"replicas": 2, "num_cpus": 1} | cluster)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, about what it imports
        from pagedllm.cluster.run import ClusterServer

        running = ClusterServer(config, ServerConfig(**options), cluster_config)
        try:
            yield running, running.start()
        finally:
            running.close()
