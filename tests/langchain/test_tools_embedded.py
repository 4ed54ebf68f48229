"""Tools and structured output through LangChain on the embedded model: whole, streamed and cut."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema_rs
import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from output_schemas import SCHEMAS
from pydantic import BaseModel
from standard_suite import EMBEDDED

from langchain_pagedllm import ChatPagedLLM

pytestmark = pytest.mark.model

PROMPTS = ("Describe {} for Łódź", "Hello! {}?", "{}: 3 of them, please")


@tool
def get_weather(location: str, days: int = 1) -> str:
    """Get the weather at a location."""
    return f"Sunny in {location} for {days} days."


class Person(BaseModel):
    """Somebody."""

    name: str
    born: int


@pytest.fixture
def chat() -> ChatPagedLLM:
    return ChatPagedLLM(**EMBEDDED)


@pytest.fixture
def wild_chat() -> ChatPagedLLM:
    """Samples at random, which takes answers to every corner of a schema."""
    return ChatPagedLLM(**{**EMBEDDED, "temperature": 1.0, "frequency_penalty": None})


def as_tool(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A tool whose arguments obey the schema; what is no object becomes the value of one."""
    if schema.get("type") != "object":
        inner = {key: value for key, value in schema.items() if key != "$defs"}
        wrapped = {"type": "object", "properties": {"value": inner}, "required": ["value"]}
        schema = wrapped | ({"$defs": schema["$defs"]} if "$defs" in schema else {})
    function = {"name": name.replace(" ", "_"), "description": f"Do {name}", "parameters": schema, "strict": True}
    return {"type": "function", "function": function}


def max_tokens_of(number: int, *, cut: int) -> int:
    """Every tenth is cut in its midst; some of the others talk for longer than this too."""
    return cut if number % 10 == 3 else 96


async def whole_and_streamed(model: Any, text: str, **options: Any) -> tuple[AIMessage, Any]:
    async def stream() -> Any:
        total = None
        async for piece in model.astream(text, **options):
            total = piece if total is None else total + piece
        return total

    return tuple(await asyncio.gather(model.ainvoke(text, **options), stream()))  # type: ignore[return-value]


def check_call(tool_: dict[str, Any], message: AIMessage, total: Any) -> bool:
    """Whether the call is whole. Then it obeys the schema, else nobody can take it for a call."""
    function = tool_["function"]
    assert message.response_metadata["finish_reason"] == total.response_metadata["finish_reason"]
    if message.response_metadata["finish_reason"] == "length":
        assert message.tool_calls == total.tool_calls == []
        pieces = "".join(piece["args"] or "" for piece in total.tool_call_chunks)
        for invalid in message.invalid_tool_calls:
            # The stream's has a bracket more, which keeps LangChain from completing it.
            assert pieces.startswith(invalid["args"] or "")
        return False
    assert message.response_metadata["finish_reason"] == "tool_calls"
    [call] = message.tool_calls
    assert call["name"] == function["name"]
    jsonschema_rs.validate(function["parameters"], call["args"])
    assert total.tool_calls == message.tool_calls
    [piece] = total.tool_call_chunks
    assert json.loads(piece["args"]) == call["args"]
    assert message.invalid_tool_calls == []
    assert message.content == ""
    return True


def check_answer(schema: Any, message: AIMessage, total: Any) -> bool:
    """Whether the answer is whole. Then it obeys the schema; its pieces join to the same text in any case."""
    assert total.text == message.text
    assert total.response_metadata["finish_reason"] == message.response_metadata["finish_reason"]
    if message.response_metadata["finish_reason"] == "length":
        return False
    assert message.response_metadata["finish_reason"] == "stop"
    jsonschema_rs.validate(schema, json.loads(message.text))
    return True


EACH = pytest.mark.parametrize("num_each", [1, pytest.param(20, marks=pytest.mark.slow)])


@EACH
async def test_forced_calls_over_10_schemas(wild_chat: ChatPagedLLM, num_each: int) -> None:
    """200 of the slow run: a call that is cut and passes for whole is one that an agent carries out."""
    cases = [
        (as_tool(name, schema), PROMPTS[number % 3].format(name), number)
        for name, schema in SCHEMAS.items()
        for number in range(num_each)
    ]
    asked = [
        whole_and_streamed(
            wild_chat.bind_tools([tool_], tool_choice=tool_["function"]["name"]),
            text,
            seed=number,
            max_tokens=max_tokens_of(number + place, cut=24),
        )
        for place, (tool_, text, number) in enumerate(cases)
    ]
    answers = await asyncio.gather(*asked)
    num_whole = sum(check_call(tool_, *answer) for (tool_, _, _), answer in zip(cases, answers, strict=True))
    assert len(cases) * 0.6 <= num_whole < len(cases)


@EACH
async def test_structured_answers_over_10_schemas(wild_chat: ChatPagedLLM, num_each: int) -> None:
    cases = [
        (schema, PROMPTS[number % 3].format(name), number)
        for name, schema in SCHEMAS.items()
        for number in range(num_each)
    ]
    asked = [
        whole_and_streamed(
            wild_chat,
            text,
            seed=number,
            max_tokens=max_tokens_of(number + place, cut=3),
            response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        )
        for place, (schema, text, number) in enumerate(cases)
    ]
    answers = await asyncio.gather(*asked)
    num_whole = sum(check_answer(schema, *answer) for (schema, _, _), answer in zip(cases, answers, strict=True))
    assert len(cases) * 0.6 <= num_whole < len(cases)


def test_arguments_have_their_types_and_letters(chat: ChatPagedLLM) -> None:
    """Numbers as numbers, and no letter escaped or lost on the way."""
    bound = chat.bind_tools([get_weather], tool_choice="any")
    [call] = bound.invoke("What will the weather in '東京' be for the next 3 days?").tool_calls
    assert call["name"] == "get_weather"
    assert isinstance(call["args"]["location"], str)
    assert isinstance(call["args"].get("days", 1), int)
    [named] = chat.bind_tools([get_weather, Person], tool_choice="Person").invoke("Hello!").tool_calls
    assert isinstance(Person(**named["args"]), Person)


def test_a_turn_of_an_agent(chat: ChatPagedLLM) -> None:
    """The call, its answer and the answer to that: the second prompt goes on from the first in the cache."""
    bound = chat.bind_tools([get_weather], tool_choice="any")
    asked: list[Any] = [("human", "What is the weather in Paris?")]
    message = bound.invoke(asked)
    answer = get_weather.invoke(message.tool_calls[0])
    assert isinstance(answer, ToolMessage)
    last = chat.bind_tools([get_weather], tool_choice="none").invoke([*asked, message, answer], max_tokens=8)
    assert last.text
    assert last.usage_metadata is not None
    assert message.usage_metadata is not None
    cached = last.usage_metadata["input_token_details"]["cache_read"]
    assert cached > message.usage_metadata["input_tokens"] - 32


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_each_method(chat: ChatPagedLLM, method: Any) -> None:
    """Also json_mode ends: held to the schema, there is no object in an object without end."""
    answer = chat.with_structured_output(Person, method=method).invoke("Ada Lovelace was born in 1815.")
    assert isinstance(answer, Person)
    assert "Ada" in answer.name


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_a_cut_answer_is_an_error(chat: ChatPagedLLM, method: Any) -> None:
    """LangChain's parsers close what is open, and half a name would be taken for a whole one."""
    chain: Any = chat.with_structured_output(Person, method=method)
    tokens = 20 if method == "function_calling" else 5
    with pytest.raises(OutputParserException, match=r"cut|not whole"):
        chain.invoke("Ada Lovelace was born in 1815.", max_tokens=tokens)
    # LangChain's map of raw and parsed passes no options on, so they are bound.
    with_raw: Any = chat.with_structured_output(Person, method=method, include_raw=True, max_tokens=tokens)
    raw = with_raw.invoke("Ada Lovelace was born in 1815.")
    assert raw["parsed"] is None
    assert isinstance(raw["parsing_error"], OutputParserException)
    assert raw["raw"].response_metadata["finish_reason"] == "length"
