"""Tools and answer formats: from OpenAI's words for them, which LangChain uses, to the engine's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.utils.function_calling import convert_to_openai_tool

from pagedllm.api import StructuredOutput, Tool
from pagedllm.errors import InvalidRequestError

__all__ = ["to_openai_tool", "to_structured_output", "to_tool_choice", "to_tools"]

# vLLM's words for what an answer must be, and the engine's.
_KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


def to_openai_tool(tool: Any, *, strict: bool | None = None) -> dict[str, Any]:
    """A function, class, schema, dictionary or LangChain tool in OpenAI's form, its ``cache_control`` kept.

    Raises:
        InvalidRequestError: It is a tool that some provider runs, such as a web search.
    """
    converted = convert_to_openai_tool(tool, strict=strict)
    if converted.get("type") != "function":
        allowed = "must be 'function': this engine runs no tools of its own"
        raise InvalidRequestError.for_value("tools.type", converted.get("type"), allowed)
    source = tool if isinstance(tool, Mapping) else getattr(tool, "extras", None) or {}
    markers = {name: source[name] for name in ("cache_control", "prompt_cache_breakpoint", "extras") if name in source}
    return {**converted, **markers}


def to_tools(tools: Sequence[Any] | None) -> tuple[Tool, ...]:
    """The engine's tools, of whatever LangChain takes for one."""
    converted = []
    for tool in tools or ():
        function = to_openai_tool(tool)["function"]
        converted.append(
            Tool(
                name=function["name"],
                description=function.get("description") or "",
                parameters=function.get("parameters"),
                strict=bool(function.get("strict")),
            )
        )
    return tuple(converted)


def to_tool_choice(tool_choice: Any, names: Sequence[str]) -> str:
    """``"auto"``, ``"none"``, ``"required"`` or a tool's name.

    Args:
        tool_choice: One of these; ``"any"`` or True, for required; None or False, for auto; or OpenAI's or Anthropic's
            dictionary for one tool.
        names: Of the tools that there are.

    Raises:
        InvalidRequestError: Something else.
    """
    if tool_choice is None or tool_choice is False:
        return "auto"
    if tool_choice is True or tool_choice == "any":
        return "required"
    name = tool_choice
    if isinstance(tool_choice, Mapping):
        function = tool_choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else tool_choice.get("name")
        if name is None and tool_choice.get("type") in ("any", "auto", "none"):
            return to_tool_choice(tool_choice["type"], names)
    if not isinstance(name, str) or name not in ("auto", "none", "required", *names):
        allowed = f"must be one of auto, none, any, required, {', '.join(names)}"
        raise InvalidRequestError.for_value("tool_choice", tool_choice, allowed)
    return name


def to_structured_output(response_format: Any, structured_outputs: Any) -> StructuredOutput | None:
    """What an answer must be; None: a text.

    Args:
        response_format: OpenAI's ``{"type": "json_schema", "json_schema": {"schema": ...}}``, ``json_object`` (with
            ``"schema"``, as some servers have it, one of that schema) or ``text``.
        structured_outputs: vLLM's ``{"json" | "regex" | "choice" | "grammar": ...}``.

    Raises:
        InvalidRequestError: Naming what is wrong; also if both are given.
    """
    if structured_outputs is None:
        return None if response_format is None else _of_response_format(response_format)
    if response_format is not None:
        raise InvalidRequestError("give response_format or structured_outputs, not both", param="structured_outputs")
    allowed = f"must be a dictionary with one of {', '.join(_KINDS)}"
    if not isinstance(structured_outputs, Mapping) or len(structured_outputs) != 1:
        raise InvalidRequestError.for_value("structured_outputs", structured_outputs, allowed)
    [(kind, value)] = structured_outputs.items()
    if kind not in _KINDS:
        raise InvalidRequestError.for_value("structured_outputs", kind, allowed)
    return StructuredOutput(**{_KINDS[kind]: value})


def _of_response_format(value: Any) -> StructuredOutput | None:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput(json_schema=value.get("schema", True))
    schema = value.get("json_schema") if kind == "json_schema" else None
    if not isinstance(schema, Mapping) or "schema" not in schema:
        allowed = (
            "must be {'type': 'text'}, {'type': 'json_object'} or "
            "{'type': 'json_schema', 'json_schema': {'name': ..., 'schema': ...}}"
        )
        raise InvalidRequestError.for_value("response_format", value, allowed)
    return StructuredOutput(json_schema=schema["schema"])
