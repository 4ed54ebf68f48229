"""Tools that may be called <-> the fields ``tools``, ``tool_choice`` and ``parallel_tool_calls``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..api import GenerateRequest, Tool
from ..errors import InvalidRequestError
from .body import Body

__all__ = ["decode_tools", "encode_tools"]

_WORDS = ("auto", "none", "required")


def encode_tools(request: GenerateRequest) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    fields: dict[str, Any] = {}
    if request.tools:
        fields["tools"] = [_encode_tool(tool) for tool in request.tools]
    if request.tool_choice in _WORDS[1:]:
        fields["tool_choice"] = request.tool_choice
    elif request.tool_choice != "auto":
        fields["tool_choice"] = {"type": "function", "function": {"name": request.tool_choice}}
    if request.parallel_tool_calls is not None:
        fields["parallel_tool_calls"] = request.parallel_tool_calls
    return fields


def decode_tools(body: Body) -> dict[str, Any]:
    """Takes the fields out of the body; what they give is for GenerateRequest.

    Raises:
        InvalidRequestError: Naming what is no function of ours, or no choice.
    """
    tools = [_decode_tool(item, f"tools[{place}]") for place, item in enumerate(body.take_as(list, "tools", []))]
    return {
        "tools": tuple(tools),
        "tool_choice": _decode_choice(body.take("tool_choice")),
        "parallel_tool_calls": body.take_as(bool, "parallel_tool_calls"),
    }


def _encode_tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = tool.schema
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _decode_tool(value: Any, name: str) -> Tool:
    body = Body(value, name)
    kind = body.take("type")
    if kind != "function":
        allowed = "must be 'function': this server runs no tools of its own"
        raise InvalidRequestError.for_value(f"{name}.type", kind, allowed)
    function = Body(body.take("function"), f"{name}.function")
    parameters = function.take("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        path = f"{name}.function.parameters"
        raise InvalidRequestError.for_value(path, parameters, "a JSON schema must be an object")
    tool = Tool(
        name=function.take_as(str, "name", ""),
        description=function.take_as(str, "description", ""),
        parameters=parameters,
        strict=function.take_as(bool, "strict", False),
    )
    function.close()
    body.close()
    return tool


def _decode_choice(value: Any) -> str:
    if value is None:
        return "auto"
    if isinstance(value, str):
        return value  # one that is neither a word nor a tool's name is refused with the request
    body = Body(value, "tool_choice")
    kind = body.take("type")
    if kind != "function":
        allowed = f"must be 'function', or tool_choice one of {', '.join(_WORDS)}"
        raise InvalidRequestError.for_value("tool_choice.type", kind, allowed)
    function = Body(body.take("function"), "tool_choice.function")
    name: str = function.take_as(str, "name", "")
    function.close()
    body.close()
    return name
