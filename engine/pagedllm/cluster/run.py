"""Run the application on this machine, or on the Ray cluster that ``RAY_ADDRESS`` names, until a signal ends it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

# Nothing is reported to anybody, unless the user says otherwise.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.schema import LoggingConfig

from ..config import EngineConfig
from ..errors import ConfigError, EngineError
from ..server.config import ServerConfig
from .application import APP_NAME, ENGINES, build_application
from .config import ClusterConfig
from .engine import ClusterEngine

__all__ = ["ClusterServer"]

logger = logging.getLogger(__name__)

_ADDRESS_VARIABLE = "RAY_ADDRESS"
# Requests and answers pass through it only when they are large; weights never do.
_OBJECT_STORE_BYTES = 128 << 20


class ClusterServer:
    """Engines and their ingress, from ``start`` to ``close``.

    Args:
        config: Of each engine.
        server_config: How to serve.
        cluster_config: How many engines, and where requests go.
    """

    def __init__(self, config: EngineConfig, server_config: ServerConfig, cluster_config: ClusterConfig) -> None:
        self.config, self.server_config, self.cluster_config = config, server_config, cluster_config
        self._is_open = False

    def __enter__(self) -> ClusterServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def start(self) -> str:
        """Start everything and wait until it serves.

        Returns:
            The URL of the server.

        Raises:
            ConfigError: The address cannot be had.
            EngineError: The engines cannot be started; the reason is in the log.
        """
        host, port = self.server_config.host, _free_port(self.server_config)
        self._is_open = True
        _start_ray(self.cluster_config)
        quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
        serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host=host, port=port), logging_config=quiet)
        application = build_application(self.config, self.server_config, self.cluster_config)
        try:
            serve.run(application, name=APP_NAME, route_prefix="/", logging_config=quiet)
        except RuntimeError as error:
            raise EngineError(f"the engines cannot be started: {_reason() or error}") from error
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def engine(self) -> ClusterEngine:
        """An engine over the same replicas in this process; the caller closes it."""
        handle = serve.get_deployment_handle(ENGINES, app_name=APP_NAME)
        return ClusterEngine(handle, self.config, follows=self.cluster_config.router == "prefix")

    def wait_for_signal(self) -> None:
        """Wait for the first Ctrl-C or SIGTERM; the second ends the process at once."""
        asked = threading.Event()
        with _on_signals(asked):
            asked.wait()

    def close(self) -> None:
        """Let running requests end, within the server's ``shutdown_timeout_s``, and stop everything."""
        if not self._is_open:
            return
        self._is_open = False
        if ray.is_initialized():
            with contextlib.suppress(Exception):  # whatever is broken: Ray ends its processes below
                serve.shutdown()
            ray.shutdown()


def _reason() -> str:
    """Why the engines did not start: the last error in what Serve tells of them."""
    deployments = serve.status().applications[APP_NAME].deployments.values()
    errors = [line.strip() for item in deployments for line in item.message.splitlines() if "Error: " in line]
    return (errors or [""])[-1].removeprefix("pagedllm.errors.")


def _start_ray(cluster_config: ClusterConfig) -> None:
    options: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": True}
    if os.environ.get(_ADDRESS_VARIABLE):
        ray.init(address="auto", **options)
        return
    num_engines = cluster_config.max_replicas or cluster_config.replicas
    options |= {
        "address": "local",
        # Logical CPUs: Ray must not refuse what the user asked this machine for.
        "num_cpus": max(1, math.ceil(num_engines * cluster_config.num_cpus)),
        "object_store_memory": _OBJECT_STORE_BYTES,
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
    }
    try:
        ray.init(**options)
    except Exception as error:  # Ray has no class for it: its processes were not up in 30 s
        logger.warning("Ray did not start, once more: %s", error)
        ray.shutdown()
        ray.init(**options)


def _free_port(config: ServerConfig) -> int:
    """The port to listen on, after making sure that it can be had."""
    try:
        info = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(info[0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(info[4])
            return int(probe.getsockname()[1])
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror or error}") from error


@contextlib.contextmanager
def _on_signals(asked: threading.Event) -> Iterator[None]:
    def handle(*_: object) -> None:
        if asked.is_set():
            os._exit(1)  # asked for twice: nothing may wait
        asked.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
