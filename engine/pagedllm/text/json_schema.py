"""JSON schemas on their way into a grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ..errors import InvalidRequestError

__all__ = ["arguments_schema", "json_rule"]

# One space or none, or a new line with an indentation. Models that may write any white space write it without end.
_WHITE_SPACE = r" ?|\n {0,16}"
_ONE_LINE = r" ?"
# Where schemas lie in a schema: alone, in a list, by name.
_ONE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# With one of these a value must obey several schemas at once, and closing one of them would shut out the others.
_CONJUNCTIONS = ("allOf", "if", "then", "else", "not", "dependentSchemas", "unevaluatedProperties")
_OPENNESS = ("additionalProperties", "patternProperties", "unevaluatedProperties")


def json_rule(schema: dict[str, Any], *, lenient: bool = False, one_line: bool = False) -> str:
    """The right side of a rule in Lark's notation: JSON that obeys a schema, with little white space.

    Args:
        schema: JSON; not changed.
        lenient: Leave out what cannot be enforced, instead of refusing it.
        one_line: Without line breaks.
    """
    guidance = {"whitespace_pattern": _ONE_LINE if one_line else _WHITE_SPACE, "lenient": lenient}
    return f"%json {json.dumps({**_closed(schema), 'x-guidance': guidance}, ensure_ascii=False)}"


def arguments_schema(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object.

    Raises:
        InvalidRequestError: They are something else.
    """
    kind = schema.get("type", "object")
    if kind != "object":
        reason = f"tools: the parameters of {name!r} must be an object, not {kind!r}"
        raise InvalidRequestError(reason, param="tools")
    return {"type": "object", **schema}


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with no properties besides those it names, where it leaves that open.

    What obeys the closed one obeys the open one, and a small model that may invent properties does so without end.
    Left alone where a value has to obey several schemas.
    """
    for part in _schemas(schema):
        together = sum(key in part for key in ("properties", "$ref", "anyOf", "oneOf"))
        if together > 1 or any(key in part for key in _CONJUNCTIONS):
            return schema
    closed: dict[str, Any] = json.loads(json.dumps(schema))
    for part in _schemas(closed):
        if "properties" in part and not any(key in part for key in _OPENNESS):
            part["additionalProperties"] = False
    return closed


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all schemas in it, but no values such as those of ``enum`` or ``default``."""
    if not isinstance(schema, dict):
        return
    yield schema
    inner: list[Any] = [schema.get(key) for key in _ONE]
    for key in (*_LISTS, *_ONE):
        inner += value if isinstance(value := schema.get(key), list) else []
    for key in _MAPS:
        inner += value.values() if isinstance(value := schema.get(key), dict) else []
    for item in inner:
        yield from _schemas(item)
