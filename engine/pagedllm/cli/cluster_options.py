"""Options of replicas on the command line, made from ClusterConfig, so that there is one list of them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ..cluster.config import ClusterConfig
from ..errors import ConfigError
from .options import describe_options, with_signature

__all__ = ["with_cluster_options"]


def with_cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each field of ClusterConfig.

    The command takes the ClusterConfig that they make as its argument ``cluster_config``; None without ``--replicas``,
    which the other options need.
    """
    fields = dataclasses.fields(ClusterConfig)

    @functools.wraps(command)
    def wrapper(*args: Any, **options: Any) -> None:
        chosen = {field.name: options.pop(field.name) for field in fields}
        given = {name: value for name, value in chosen.items() if value is not None}
        if given and "replicas" not in given:
            name = next(iter(given))
            raise ConfigError.for_value(name, given[name], "is about several engines: give --replicas too")
        command(*args, **options, cluster_config=ClusterConfig(**given) if given else None)

    types, helps = typing.get_type_hints(ClusterConfig), describe_options(ClusterConfig)
    own = list(inspect.signature(command, eval_str=True).parameters.values())
    parameters = [
        *(item for item in own if item.name != "cluster_config"),
        *(_parameter(field, types[field.name], helps[field.name]) for field in fields),
    ]
    return with_signature(wrapper, parameters)


def _parameter(field: dataclasses.Field[Any], kind: Any, help_text: str) -> inspect.Parameter:
    shown = "" if field.default is None or field.name == "replicas" else f" [default: {field.default}]"
    annotation = Annotated[kind | None, typer.Option(help=help_text + shown)]
    return inspect.Parameter(field.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)
