"""Options of the server on the command line, made from ServerConfig, so that there is one list of them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..server.auth import KEY_VARIABLE, KEYS_VARIABLE, find_keys
from ..server.config import ServerConfig
from .options import describe_options, with_signature

__all__ = ["with_server_options"]

# Secrets never come from the command line, which others on the machine can see.
_KEY_FILE_HELP = (
    f"File of API keys, a line each: 'name secret' or 'name secret admin'. {KEYS_VARIABLE} holds the same, with ';' "
    f"for line ends, {KEY_VARIABLE} the secret of one admin."
)


def with_server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each field of ServerConfig: ``idle_timeout_s`` is ``--idle-timeout``.

    The command takes the ServerConfig that they make as its argument ``server_config``.
    """
    fields = {_option(field.name): field for field in dataclasses.fields(ServerConfig) if field.name != "api_keys"}

    @functools.wraps(command)
    def wrapper(*args: Any, **options: Any) -> None:
        chosen = {field.name: options.pop(name) for name, field in fields.items()}
        keys = find_keys(options.pop("api_key_file"))
        command(*args, **options, server_config=ServerConfig(**chosen, api_keys=tuple(keys)))

    types, helps = typing.get_type_hints(ServerConfig), describe_options(ServerConfig)
    own = list(inspect.signature(command, eval_str=True).parameters.values())
    key_file = Annotated[Path | None, typer.Option(help=_KEY_FILE_HELP)]
    parameters = [
        *(item for item in own if item.name != "server_config"),
        *(_parameter(name, field.default, types[field.name], helps[field.name]) for name, field in fields.items()),
        _parameter("api_key_file", None, key_file),
    ]
    return with_signature(wrapper, parameters)


def _option(field: str) -> str:
    return field.removesuffix("_s")


def _parameter(name: str, default: Any, kind: Any, help_text: str | None = None) -> inspect.Parameter:
    annotation = kind if help_text is None else Annotated[kind, typer.Option(help=help_text)]
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)
