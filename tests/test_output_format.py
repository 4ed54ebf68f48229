"""What a request may say about the form of its answer is checked when it is built, with the field's name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagedllm.api import GenerateRequest, Message, SamplingParams, StructuredOutput, Tool
from pagedllm.errors import InvalidRequestError

ASK = (Message(role="user", content="Hello"),)
ADD = Tool(name="add", description="Add", parameters={"type": "object", "properties": {"a": {"type": "integer"}}})
YES = StructuredOutput(choice=("yes", "no"))


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"x": schema}
    return schema


def test_schema_is_kept_as_its_own_json() -> None:
    """The order of properties is the order in which a model writes them; a caller's dict may change later."""
    schema = {"type": "object", "properties": {"größe": {}, "a": {}}}
    output = StructuredOutput(json_schema=schema)
    text = '{"type": "object", "properties": {"größe": {}, "a": {}}}'
    schema["properties"] = {}
    assert output.json_schema == text
    assert StructuredOutput(json_schema=text) == output
    assert hash(StructuredOutput(json_schema=text)) == hash(output)
    assert StructuredOutput(json_schema=True).json_schema == '{"type": "object"}'
    assert json.loads(str(Tool(name="f").parameters)) == {"type": "object", "properties": {}}


def test_nesting_limit() -> None:
    """Deeper ones break every recursion behind; one within the limit is no reason to refuse."""
    assert StructuredOutput(json_schema=nested(64)).kind == "json_schema"
    loop: dict[str, Any] = {}
    loop["x"] = [loop]
    for schema in (nested(65), nested(100_000), loop):
        with pytest.raises(InvalidRequestError, match="nested deeper than 64"):
            StructuredOutput(json_schema=schema)
    with pytest.raises(InvalidRequestError, match="not JSON"):
        StructuredOutput(json_schema="[" * 60_000 + "]" * 60_000)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "exactly one of json_schema, regex, choice, grammar; given: none"),
        ({"regex": "a", "choice": ("b",)}, "given: regex, choice"),
        ({"json_schema": False}, "must be an object"),
        ({"json_schema": [1]}, "must be an object"),
        ({"json_schema": "{"}, "not JSON"),
        ({"json_schema": {"a": float("nan")}}, "not JSON"),
        ({"json_schema": {"a": {1, 2}}}, "not JSON"),
        ({"json_schema": {"a": "x" * 200_000}}, "bytes, at most 131072"),
        ({"json_schema": {"a": "\ud800"}}, "lone surrogate"),
        ({"regex": ""}, "not empty"),
        ({"regex": 3}, "not empty"),
        ({"choice": ()}, "none of them empty"),
        ({"choice": ("a", "")}, "none of them empty"),
        ({"choice": "ab"}, "must be a list of str"),
        ({"grammar": "x" * 200_000}, "bytes, at most"),
    ],
)
def test_bad_structured_output(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        StructuredOutput(**options)
    assert str(caught.value.param).partition(".")[0] == "structured_output"


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"name": ""}, "tools.name", "1 to 128"),
        ({"name": "x" * 129}, "tools.name", "1 to 128"),
        ({"name": "a\nb"}, "tools.name", "printable"),
        ({"name": "required"}, "tools.name", "a word of tool_choice"),
        ({"name": "f", "description": None}, "tools.description", "must be a text"),
        ({"name": "f", "parameters": []}, "tools", "must be an object"),
        ({"name": "f", "parameters": nested(65)}, "tools", "deeper"),
        ({"name": "f", "strict": "yes"}, "tools.strict", "True or False"),
    ],
)
def test_bad_tool(options: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        Tool(**options)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"tools": [ADD, ADD]}, "tools", "given twice"),
        ({"tools": [ADD], "tool_choice": "sub"}, "tool_choice", "auto, none, required, add"),
        ({"tools": [{"name": "add"}]}, "tools", "list of Tool"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [ADD], "parallel_tool_calls": 1}, "parallel_tool_calls", "True, False or None"),
        ({"tools": [ADD], "tool_choice": "add", "structured_output": YES}, "tool_choice", "calls only"),
        ({"structured_output": "yes"}, "structured_output", "must be a StructuredOutput"),
        ({"structured_output": YES, "sampling": SamplingParams(min_tokens=2)}, "min_tokens", "where they are complete"),
        ({"tools": [ADD], "sampling": SamplingParams(ignore_eos=True)}, "ignore_eos", "where they are complete"),
        ({"messages": None, "prompt": "x", "tools": [ADD]}, "tools", "for messages"),
    ],
)
def test_bad_request(options: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        GenerateRequest(**{"messages": ASK, **options})
    assert caught.value.param == param


def test_what_goes_together() -> None:
    request = GenerateRequest(messages=ASK, tools=[ADD], structured_output=YES)  # type: ignore[arg-type]
    assert (request.tools, request.calls_tools, request.must_call) == ((ADD,), True, False)
    request = GenerateRequest(messages=ASK, tools=(ADD,), tool_choice="add")
    assert request.must_call
    # Where there are no calls, an answer is a text like any other.
    silent = GenerateRequest(
        messages=ASK, tools=(ADD,), tool_choice="none", sampling=SamplingParams(ignore_eos=True, max_tokens=4)
    )
    assert not silent.calls_tools
