"""What an answer must be <-> the fields ``response_format``, OpenAI's, and ``structured_outputs``, vLLM's."""

from __future__ import annotations

import json
from typing import Any

from ..api import StructuredOutput
from ..errors import InvalidRequestError
from .body import Body
from .sampling import Kind

__all__ = ["decode_structured_output", "encode_structured_output"]

_ANY_OBJECT = {"type": "object"}
# vLLM's words, and the engine's.
_KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


def encode_structured_output(output: StructuredOutput | None, kind: Kind) -> dict[str, Any]:
    """The field that asks for it; a chat's JSON goes by ``response_format``, which most servers know."""
    if output is None:
        return {}
    if output.json_schema is None:
        value = getattr(output, output.kind)
        return {"structured_outputs": {output.kind: list(value) if isinstance(value, tuple) else value}}
    schema = json.loads(str(output.json_schema))
    if kind == "completion":
        return {"structured_outputs": {"json": schema}}
    if schema == _ANY_OBJECT:
        return {"response_format": {"type": "json_object"}}
    named = {"name": "answer", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def decode_structured_output(body: Body) -> StructuredOutput | None:
    """Takes both fields out of the body; None: the answer is a text.

    Raises:
        InvalidRequestError: Naming what is wrong; also if both ask for something.
    """
    by_format = _decode_format(body.take("response_format"))
    by_words = _decode_words(body.take("structured_outputs"))
    if by_format is not None and by_words is not None:
        raise InvalidRequestError("give response_format or structured_outputs, not both", param="structured_outputs")
    return by_words if by_format is None else by_format


def _decode_format(value: Any) -> StructuredOutput | None:
    if value is None:
        return None
    body = Body(value, "response_format")
    kind = body.take("type")
    if kind not in ("text", "json_object", "json_schema"):
        allowed = "must be one of text, json_object, json_schema"
        raise InvalidRequestError.for_value("response_format.type", kind, allowed)
    output = None
    if kind == "json_object":
        # Some servers' clients give the schema here.
        output = StructuredOutput(json_schema=body.take_as(dict, "schema", _ANY_OBJECT))
    elif kind == "json_schema":
        named = Body(body.take("json_schema"), "response_format.json_schema")
        schema = named.take_as(dict, "schema")
        if schema is None:
            allowed = "must be an object"
            raise InvalidRequestError.for_value("response_format.json_schema.schema", schema, allowed)
        # Every answer is held to all of its schema, so that strict asks for nothing more.
        for field, field_type in (("name", str), ("description", str), ("strict", bool)):
            named.take_as(field_type, field)
        named.close()
        output = StructuredOutput(json_schema=schema)
    body.close()
    return output


def _decode_words(value: Any) -> StructuredOutput | None:
    if value is None:
        return None
    body = Body(value, "structured_outputs")
    given = {name: item for name in _KINDS if (item := body.take(name)) is not None}
    any_object = body.take_as(bool, "json_object", False)
    body.close()
    if any_object:
        given["json_object"] = True
    if len(given) != 1:
        allowed = f"must have exactly one of {', '.join(_KINDS)}, json_object"
        raise InvalidRequestError.for_value("structured_outputs", sorted(given), allowed)
    [(name, item)] = given.items()
    return StructuredOutput(**{"json_schema": _ANY_OBJECT} if name == "json_object" else {_KINDS[name]: item})
