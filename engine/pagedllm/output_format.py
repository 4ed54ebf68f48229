"""What an answer may look like: a structure that it must have, tools that it may call, and the calls in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import InvalidRequestError
from .sampling_params import as_tuple

__all__ = ["TOOL_CHOICES", "StructuredOutput", "Tool", "ToolCallDelta", "check_tools"]

TOOL_CHOICES = ("auto", "none", "required")
_MAX_BYTES = 128 * 1024
_MAX_DEPTH = 64
_MAX_NAME = 128
_KINDS = ("json_schema", "regex", "choice", "grammar")


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """What a whole answer must be: exactly one of four kinds.

    Args:
        json_schema: JSON that obeys this schema: a mapping, its JSON text, or True for any object. Kept as JSON text.
        regex: A text that the expression matches from beginning to end; without look-around and back references.
        choice: One of these texts.
        grammar: A text of a context-free grammar, in Lark's notation or GBNF's, as llguidance takes them.

    Raises:
        InvalidRequestError: Not exactly one, not of that kind, more than 128 KiB, or nested deeper than 64.
    """

    json_schema: Mapping[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise _refused(f"give exactly one of {', '.join(_KINDS)}; given: {', '.join(given) or 'none'}")
        if self.json_schema is not None:
            schema = {"type": "object"} if self.json_schema is True else self.json_schema
            object.__setattr__(self, "json_schema", _schema_text("structured_output", schema))
        if self.choice is not None:
            object.__setattr__(self, "choice", as_tuple("structured_output.choice", self.choice, str))
            if not self.choice or "" in self.choice:
                raise _refused("choice must be a list of texts, none of them empty")
            _check_text("structured_output.choice", "".join(self.choice))
        for kind in ("regex", "grammar"):
            value = getattr(self, kind)
            if value is not None and (not isinstance(value, str) or not value):
                raise _refused(f"{kind} must be a text that is not empty")
            _check_text(f"structured_output.{kind}", value or "")

    @property
    def kind(self) -> str:
        """Which of the four it is."""
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may ask to be called.

    Args:
        name: At most 128 characters.
        description: What it is for, told to the model.
        parameters: JSON Schema of its arguments, an object's: a mapping or its JSON text; None: it has none. Kept as
            JSON text.
        strict: Refuse a request whose schema says something that a call cannot be held to. Else that is left out,
            and calls obey the rest.

    Raises:
        InvalidRequestError: Naming the field and what is allowed.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | str | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 0 < len(self.name) <= _MAX_NAME or not self.name.isprintable():
            allowed = f"must be a text of 1 to {_MAX_NAME} printable characters"
            raise InvalidRequestError.for_value("tools.name", self.name, allowed)
        if self.name in TOOL_CHOICES:
            raise InvalidRequestError.for_value("tools.name", self.name, "is a word of tool_choice; choose another")
        if not isinstance(self.description, str):
            raise InvalidRequestError.for_value("tools.description", self.description, "must be a text")
        if not isinstance(self.strict, bool):
            raise InvalidRequestError.for_value("tools.strict", self.strict, "must be True or False")
        _check_text("tools.name", self.name)
        _check_text("tools.description", self.description)
        schema = {"type": "object", "properties": {}} if self.parameters is None else self.parameters
        object.__setattr__(self, "parameters", _schema_text("tools.parameters", schema))

    @property
    def schema(self) -> dict[str, Any]:
        """A fresh copy of ``parameters``."""
        assert isinstance(self.parameters, str)
        schema: dict[str, Any] = json.loads(self.parameters)
        return schema


@dataclass(frozen=True, kw_only=True)
class ToolCallDelta:
    """What is new of a call in a streamed answer.

    Args:
        index: Which call of the choice it belongs to, counted from 0.
        id: On the first piece of each call.
        name: Likewise.
        arguments: JSON text, exactly as the model wrote it; the pieces of a call join to its arguments.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


def check_tools(tools: Any, tool_choice: Any, parallel_tool_calls: Any) -> tuple[Tool, ...]:
    """The tools of a request as a tuple, if they and what goes with them are right."""
    checked: tuple[Tool, ...] = as_tuple("tools", tools, Tool)
    names = [tool.name for tool in checked]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise InvalidRequestError(f"tools: the name {min(repeated)!r} is given twice", param="tools")
    if sum(len(str(tool.parameters)) + len(tool.description) for tool in checked) > 2 * _MAX_BYTES:
        raise InvalidRequestError(f"tools: together more than {2 * _MAX_BYTES} characters", param="tools")
    if not isinstance(tool_choice, str) or tool_choice not in (*TOOL_CHOICES, *names):
        allowed = f"must be one of {', '.join((*TOOL_CHOICES, *names))}"
        raise InvalidRequestError.for_value("tool_choice", tool_choice, allowed)
    if tool_choice == "required" and not checked:
        raise InvalidRequestError("tool_choice='required' needs tools", param="tool_choice")
    if parallel_tool_calls is not None and not isinstance(parallel_tool_calls, bool):
        allowed = "must be True, False or None"
        raise InvalidRequestError.for_value("parallel_tool_calls", parallel_tool_calls, allowed)
    return checked


def _schema_text(param: str, schema: Any) -> str:
    if isinstance(schema, str):
        _check_text(param, schema)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{param}: not JSON: {error}", param=_root(param)) from error
    if not isinstance(schema, Mapping):
        raise InvalidRequestError.for_value(_root(param), schema, "a JSON schema must be an object")
    if _is_deep(schema):
        raise InvalidRequestError(f"{param}: nested deeper than {_MAX_DEPTH}", param=_root(param))
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{param}: not JSON: {error}", param=_root(param)) from error
    _check_text(param, text)
    return text


def _is_deep(value: Any) -> bool:
    """Whether containers lie in each other too deep; also true of one that contains itself."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = [item for item in level if isinstance(item, (Mapping, list, tuple))]
        if not inner:
            return False
        # Many references to one object would multiply from level to level.
        level = list({id(part): part for item in inner for part in _parts(item)}.values())
    return any(isinstance(item, (Mapping, list, tuple)) for item in level)


def _parts(item: Any) -> list[Any]:
    return list(item.values()) if isinstance(item, Mapping) else list(item)


def _check_text(param: str, text: str) -> None:
    try:
        num_bytes = len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        reason = f"{param} is not valid Unicode: a lone surrogate at position {error.start}"
        raise InvalidRequestError(reason, param=_root(param)) from error
    if num_bytes > _MAX_BYTES:
        raise InvalidRequestError(f"{param}: {num_bytes} bytes, at most {_MAX_BYTES} are allowed", param=_root(param))


def _refused(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_output: {reason}", param="structured_output")


def _root(param: str) -> str:
    return param.partition(".")[0]
