"""Errors of ours on the command line: one line, no traceback."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

from ..errors import ConfigError, PagedLLMError

__all__ = ["clear_errors", "one_line"]

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def clear_errors(command: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Let a command end with a line for its user: exit code 2 for a wrong option, as typer's own errors, else 1."""

    @functools.wraps(command)
    def wrapper(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        try:
            return command(*args, **kwargs)
        except PagedLLMError as error:
            typer.echo(f"Error: {one_line(error)}", err=True)
            raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error

    return wrapper


def one_line(error: BaseException) -> str:
    """An error's message without line breaks."""
    return " ".join(str(error).split())
