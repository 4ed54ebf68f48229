"""The engine's tool calls as LangChain's, whole and in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator

from langchain_core.messages import InvalidToolCall, ToolCallChunk
from langchain_core.messages import ToolCall as LangChainToolCall
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk

from pagedllm.api import Choice, Chunk, ToolCall

__all__ = ["StreamedCalls", "to_tool_calls"]

# LangChain numbers the parts of a streamed answer from 0, and joins a call to a part of the same number.
_FIRST_INDEX = 100


def to_tool_calls(choice: Choice) -> tuple[list[LangChainToolCall], list[InvalidToolCall]]:
    """The calls that can be carried out, and those that cannot: cut, or not the JSON of an object."""
    calls: list[LangChainToolCall] = []
    invalid: list[InvalidToolCall] = []
    was_cut = choice.finish_reason != "tool_calls"
    for index, call in enumerate(choice.tool_calls):
        if was_cut and index == len(choice.tool_calls) - 1:
            invalid.append(_invalid(call, f"the call was cut (finish_reason={choice.finish_reason!r})"))
            continue
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError) as error:
            invalid.append(_invalid(call, f"the arguments are not JSON: {error}"))
            continue
        if isinstance(arguments, dict):
            calls.append(tool_call(name=call.name, args=arguments, id=call.id))
        else:
            invalid.append(_invalid(call, "the arguments are not a JSON object"))
    return calls, invalid


class StreamedCalls:
    """The calls of one streamed answer."""

    def __init__(self) -> None:
        self._arguments: dict[int, str] = {}

    def convert(self, chunk: Chunk) -> Iterator[ToolCallChunk]:
        """What is new of the calls.

        LangChain completes the JSON of a call that was cut, so that it looks whole. Such a call therefore ends with a
        bracket that closes nothing, and is reported among ``invalid_tool_calls``.
        """
        for delta in chunk.tool_calls:
            index = _FIRST_INDEX + delta.index
            if delta.index not in self._arguments:
                self._arguments[delta.index] = ""
                yield tool_call_chunk(name=delta.name, args="", id=delta.id, index=index)
            if delta.arguments:
                self._arguments[delta.index] += delta.arguments
                yield tool_call_chunk(name=None, args=delta.arguments, id=None, index=index)
        if chunk.finish_reason not in (None, "tool_calls") and self._arguments:
            last = max(self._arguments)
            spoiled = _spoil(self._arguments[last])
            yield tool_call_chunk(name=None, args=spoiled, id=None, index=_FIRST_INDEX + last)


def _spoil(arguments: str) -> str:
    """What makes a piece of JSON something that no parser can complete."""
    closing: list[str] = []
    in_string = escaped = False
    for char in arguments:
        if in_string:
            in_string = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            in_string = True
        elif char in "{[":
            closing.append("}" if char == "{" else "]")
        elif char in "}]" and closing:
            closing.pop()
    end_of_string = ('""' if escaped else '"') if in_string else ""
    return end_of_string + ("}" if closing[-1:] == ["]"] else "]")


def _invalid(call: ToolCall, error: str) -> InvalidToolCall:
    return invalid_tool_call(name=call.name, args=call.arguments, id=call.id, error=error)
