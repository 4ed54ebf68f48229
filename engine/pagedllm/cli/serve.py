"""``pagedllm serve``: an engine behind a URL."""

from __future__ import annotations

import os
import sys

import typer

from ..config import EngineConfig
from ..errors import MissingDependencyError
from ..server.config import ServerConfig
from .config_file import ConfigFile
from .engines import open_engine
from .options import with_engine_options
from .server_options import with_server_options

__all__ = ["serve"]


@with_engine_options
@with_server_options
def serve(config: EngineConfig, server_config: ServerConfig, config_file: ConfigFile = None) -> None:
    """Serve a model by OpenAI's API, to this machine only unless told otherwise.

    The first Ctrl-C or SIGTERM lets running requests end, within --shutdown-timeout; a second one ends at once.
    """
    del config_file  # has set the other options' defaults already
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
