"""What the fake engine answers with where words will not do: calls, and JSON of a schema."""

from __future__ import annotations

import json
import re
from typing import Any

from pagedllm.api import GenerateRequest, StructuredOutput, Tool
from pagedllm.errors import InvalidRequestError

__all__ = ["answers_with_calls", "scripted_script"]


def answers_with_calls(request: GenerateRequest) -> bool:
    """Whether it calls: where it must, and where it may unless it has just got an answer to a call."""
    assert request.messages is not None or not request.calls_tools
    return request.calls_tools and (request.must_call or (request.messages or ())[-1].role == "user")


def scripted_script(request: GenerateRequest) -> str | None:
    """The whole answer, as a model would write it; None: endless words."""
    asked = request.prompt if isinstance(request.prompt, str) else ""
    if request.messages is not None:
        asked = next((turn.content for turn in reversed(request.messages) if turn.role == "user"), "")
    if answers_with_calls(request):
        is_named = request.tool_choice not in ("auto", "required")
        called = [tool for tool in request.tools if not is_named or tool.name == request.tool_choice]
        number = 2 if request.parallel_tool_calls and not is_named else 1
        return "\n".join(_call(tool, asked) for tool in called[:number])
    return None if request.structured_output is None else _structure(request.structured_output, asked)


def _call(tool: Tool, asked: str) -> str:
    arguments = _to_json(_value(tool.schema, tool.schema, asked))
    return f'<tool_call>\n{{"name": {_to_json(tool.name)}, "arguments": {arguments}}}\n</tool_call>'


def _structure(output: StructuredOutput, asked: str) -> str:
    if output.choice is not None:
        return output.choice[0]
    if output.json_schema is None:
        reason = f"structured_output: the fake engine knows no {output.kind}"
        raise InvalidRequestError(reason, param="structured_output")
    schema = json.loads(str(output.json_schema))
    return _to_json(_value(schema, schema, asked))


def _value(schema: Any, root: Any, asked: str) -> Any:
    """A value of the schema: numbers and quoted texts are those of the question, if it has any."""
    if "$ref" in schema:
        place = root
        for name in schema["$ref"].removeprefix("#/").split("/"):
            place = place[name]
        return _value(place, root, asked)
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return _value(schema[key][0], root, asked)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type", "object")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: _value(properties.get(name, {}), root, asked) for name in schema.get("required", ())}
    if kind == "array":
        return [_value(schema.get("items", {}), root, asked) for _ in range(schema.get("minItems", 1))]
    if kind in ("integer", "number"):
        found = re.search(r"-?\d+", asked)
        return int(found[0]) if found else schema.get("minimum", 7)
    quoted = re.search(r"'([^']*)'", asked)
    scalars: dict[str, Any] = {"string": quoted[1] if quoted else "größe 你好", "boolean": True, "null": None}
    return scalars[kind]


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
