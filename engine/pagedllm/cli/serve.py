"""``pagedllm serve``: an engine behind a URL, or several."""

from __future__ import annotations

import os
import sys

import typer

from ..cluster.config import ClusterConfig
from ..config import EngineConfig
from ..errors import MissingDependencyError
from ..server.config import ServerConfig
from .cluster_options import with_cluster_options
from .config_file import ConfigFile
from .engines import open_engine
from .options import with_engine_options
from .server_options import with_server_options

__all__ = ["serve"]


@with_engine_options
@with_server_options
@with_cluster_options
def serve(
    config: EngineConfig,
    server_config: ServerConfig,
    cluster_config: ClusterConfig | None,
    config_file: ConfigFile = None,
) -> None:
    """Serve a model by OpenAI's API, to this machine only unless told otherwise.

    The first Ctrl-C or SIGTERM lets running requests end, within --shutdown-timeout; a second one ends at once. With
    --replicas there are that many engines, run by Ray Serve.
    """
    del config_file  # has set the other options' defaults already
    if cluster_config is not None:
        _serve_cluster(config, server_config, cluster_config)
        return
    try:
        from ..server.metrics import Metrics  # noqa: PLC0415  in an extra
        from ..server.run import Server  # noqa: PLC0415  in an extra
    except ModuleNotFoundError as error:
        message = f"serving needs the package {error.name!r}: pip install 'langchain-pagedllm[server]'"
        raise MissingDependencyError(message) from error
    metrics = Metrics()
    typer.echo(f"Loading {config.model} …", err=True)
    with open_engine(config, on_step=lambda record: metrics.observe_step(record.num_tokens)) as engine:
        server = Server(engine, server_config, metrics=metrics)
        typer.echo(f"Serving {server.service.model_name} at {server.bind()}", err=True)
        server.run_until_signal()
        if server.force_exit:
            sys.stderr.flush()
            os._exit(1)  # asked for twice: nothing may wait, not even for a step of the engine


def _serve_cluster(config: EngineConfig, server_config: ServerConfig, cluster_config: ClusterConfig) -> None:
    try:
        from ..cluster.run import ClusterServer  # noqa: PLC0415  in an extra
    except ModuleNotFoundError as error:
        message = f"--replicas needs the package {error.name!r}: pip install 'langchain-pagedllm[ray]'"
        raise MissingDependencyError(message) from error
    typer.echo(f"Starting {cluster_config.replicas} engines for {config.model} …", err=True)
    with ClusterServer(config, server_config, cluster_config) as server:
        typer.echo(f"Serving {config.model} at {server.start()}", err=True)
        server.wait_for_signal()
