"""Options of the engine on the command line, made from EngineConfig, so that there is one list of them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from ..config import EngineConfig
from ..errors import ConfigError
from .errors import clear_errors

__all__ = ["MODEL_VARIABLE", "describe_engine_options", "describe_options", "with_engine_options", "with_signature"]

MODEL_VARIABLE = "PAGEDLLM_MODEL"


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each field of EngineConfig: ``max_num_seqs`` is ``--max-num-seqs``.

    A field that is neither text nor number nor switch is given as JSON. The command takes the ``EngineConfig`` that
    they make as its first argument, ``config``. Errors of ours, wrong options among them, end it with one line.
    """
    fields = {field.name: field for field in dataclasses.fields(EngineConfig)}
    types, helps = typing.get_type_hints(EngineConfig), describe_engine_options()

    @functools.wraps(command)
    @clear_errors
    def wrapper(**options: Any) -> None:
        chosen = {name: options.pop(name) for name in fields}
        for name in [name for name in fields if not _is_plain(types[name])]:
            text = chosen.pop(name)
            if text is not None:
                chosen[name] = _read_json(name, text)
        command(EngineConfig(**chosen), **options)

    own = list(inspect.signature(command, eval_str=True).parameters.values())
    assert own[0].name == "config"
    parameters = [_parameter(field, types[name], helps.get(name, "")) for name, field in fields.items()]
    # The model comes first, what is rarely given last.
    first, rest = parameters[:1], parameters[1:]
    keywords = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in (*first, *own[1:], *rest)]
    return with_signature(wrapper, keywords)


def with_signature(wrapper: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> Callable[..., None]:
    """The wrapper, with what typer and further wrappers are to read instead of its own signature."""
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # inspect reads it, see PEP 362
    return wrapper


def describe_engine_options() -> dict[str, str]:
    """What EngineConfig's docstring says about each of its fields, on one line each."""
    return describe_options(EngineConfig)


def describe_options(kind: type) -> dict[str, str]:
    """What a class's docstring says about each of its arguments, on one line each."""
    _, _, text = (inspect.getdoc(kind) or "").partition("Args:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", text, flags=re.MULTILINE)
    return {name: " ".join(help_text.replace("``", "").split()) for name, help_text in entries}


def _parameter(field: dataclasses.Field[Any], kind: Any, help_text: str) -> inspect.Parameter:
    option = typer.Option(envvar=MODEL_VARIABLE if field.name == "model" else None, help=help_text)
    default = field.default
    if not _is_plain(kind):
        kind, default, option.metavar = str | None, None, "JSON"
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _is_plain(kind: Any) -> bool:
    """Whether typer can read it: one of four types, or that or None."""
    return set(typing.get_args(kind) or (kind,)) - {type(None)} <= {str, int, float, bool}


def _read_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError.for_value(name, text, f"must be JSON ({error})") from error
