"""Tools and structured output through the server, as OpenAI's client and LangChain's model for it see them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeEngine
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from server_helpers import Running, events

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["place", "days"],
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "look_up", "description": "The weather.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
ASKED: Any = [{"role": "user", "content": "The weather in 'Łódź' for 3 days?"}]
ARGUMENTS = {"place": "Łódź", "days": 3}


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0) as made:
        yield made


def test_a_call_and_its_answer(client: openai.OpenAI, fake: FakeEngine) -> None:
    """What an agent does in turns: the message that came back goes out again as it is."""
    options: Any = {"model": "fake", "tools": TOOLS}
    first = client.chat.completions.create(messages=ASKED, **options).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.content is None
    [call] = first.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("look_up", ARGUMENTS)
    history = [*ASKED, first.message, {"role": "tool", "tool_call_id": call.id, "content": "Fine."}]
    second = client.chat.completions.create(messages=history, max_tokens=8, **options).choices[0]
    assert second.message.content
    assert second.message.tool_calls is None
    sent = fake.requests[-1].messages or ()
    assert [(turn.role, len(turn.tool_calls)) for turn in sent] == [("user", 0), ("assistant", 1), ("tool", 0)]
    assert sent[1].tool_calls[0].arguments == call.function.arguments


def test_streamed_calls(client: openai.OpenAI) -> None:
    """Name and id once, before the arguments; the client's own helper puts the pieces together."""
    options: Any = {"model": "fake", "messages": ASKED, "tools": TOOLS, "parallel_tool_calls": True}
    names: dict[int, list[str]] = {}
    for chunk in client.chat.completions.create(**options, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or []:
            assert piece.function is not None
            if piece.function.name is not None:
                assert piece.id
                assert piece.type == "function"
                names.setdefault(piece.index, []).append(piece.function.name)
            assert piece.index in names
    assert names == {0: ["look_up"], 1: ["now"]}
    with client.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion().choices[0]
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in final.message.tool_calls or []]
    assert calls == [("look_up", ARGUMENTS), ("now", {})]
    assert final.finish_reason == "tool_calls"


def test_choice_and_cut(server: Running) -> None:
    """A call that was cut keeps its piece and says ``length``; a client that trusts the reason runs nothing."""
    named = {"type": "function", "function": {"name": "now"}}
    body = server.chat("Hi", tools=TOOLS, tool_choice=named).json()
    assert body["choices"][0]["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    cut = server.chat("Hi", tools=TOOLS, tool_choice="required", max_tokens=60).json()["choices"][0]
    assert cut["finish_reason"] == "length"
    piece = cut["message"]["tool_calls"][0]["function"]["arguments"]
    whole = server.chat("Hi", tools=TOOLS, tool_choice="required").json()["choices"][0]["message"]
    assert whole["tool_calls"][0]["function"]["arguments"].startswith(piece)
    silent = server.chat("Hi", tools=TOOLS, tool_choice="none", max_tokens=5).json()["choices"][0]
    assert "tool_calls" not in silent["message"]
    streamed = events(server.chat("Hi", tools=TOOLS, tool_choice="required", max_tokens=60, stream=True))
    assert streamed[-1]["choices"][0]["finish_reason"] == "length"


def test_structured_output(client: openai.OpenAI, server: Running) -> None:
    class Weather(BaseModel):
        place: str
        days: int

    parsed = client.chat.completions.parse(model="fake", messages=ASKED, response_format=Weather)
    assert parsed.choices[0].message.parsed == Weather(**ARGUMENTS)  # type: ignore[arg-type]
    one = server.complete("Yes?", structured_outputs={"choice": ["no", "yes"]}).json()
    assert one["choices"][0]["text"] == "no"
    assert server.chat("x", response_format={"type": "json_object"}).json()["choices"][0]["message"]["content"] == "{}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": "look"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {"lark": "x"}}, "structured_outputs.lark"),
    ],
)
def test_refused(server: Running, fields: dict[str, Any], param: str) -> None:
    response = server.chat("x", **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_every_field_is_described(server: Running) -> None:
    """Tools that are made from the description must not leave out what there is."""
    schemas = server.client.get("/openapi.json").json()["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    fields = schemas["content"]["application/json"]["schema"]["properties"]
    assert {"tools", "tool_choice", "parallel_tool_calls", "response_format", "structured_outputs"} <= set(fields)


HOSTILE: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({"structured_outputs": {"regex": "(a+)+(a+)+$"}}, (200,)),
    ({"structured_outputs": {"regex": "(?=a)b"}}, (400,)),
    ({"structured_outputs": {"regex": "(((a{1,999}){1,999}){1,999}){1,999}"}}, (200, 400)),
    ({"structured_outputs": {"grammar": "start: start start | start"}}, (200, 400)),
    ({"structured_outputs": {"json": {"$ref": "#"}}}, (200, 400)),
    ({"structured_outputs": {"json": {"$ref": "file:///etc/passwd"}}}, (400,)),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"pattern": "("}}}]}, (200, 400)),
]


@pytest.mark.model
@pytest.mark.parametrize(("fields", "statuses"), HOSTILE)
def test_hostile_grammars(smollm: Running, fields: dict[str, Any], statuses: tuple[int, ...]) -> None:
    """Patterns and schemas come from anybody: none may keep the engine from the requests of others."""
    answer = smollm.chat("a", max_tokens=4, **fields)
    assert answer.status_code in statuses, answer.text
    assert smollm.chat("a", max_tokens=2).status_code == 200
    assert smollm.client.get("/health").status_code == 200


@pytest.fixture
def langchain_model(server: Running) -> Iterator[ChatOpenAI]:
    with httpx.Client() as http_client:
        yield ChatOpenAI(base_url=server.v1, api_key="none", model="fake", http_client=http_client, max_retries=0)  # type: ignore[arg-type]


@tool
def look_up(place: str, days: int) -> str:
    """Look the weather up."""
    return "fine"


class Weather(BaseModel):
    """The weather."""

    place: str
    days: int


def test_langchain_openai_tools(langchain_model: ChatOpenAI) -> None:
    for choice in ("any", "look_up", None):
        bound = langchain_model.bind_tools([look_up], tool_choice=choice)
        message: Any = bound.invoke("Weather in 'Łódź', 3 days?")
        assert [(call["name"], call["args"]) for call in message.tool_calls] == [("look_up", ARGUMENTS)]
        total: Any = None
        for piece in bound.stream("Weather in 'Łódź', 3 days?"):
            total = piece if total is None else total + piece
        assert [(call["name"], call["args"]) for call in total.tool_calls] == [("look_up", ARGUMENTS)]
        assert total.response_metadata["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_openai_structures(langchain_model: ChatOpenAI, method: Any) -> None:
    """Of its json_mode only that an object comes back: the scripted engine writes an empty one."""
    chain = langchain_model.with_structured_output(Weather, method=method, include_raw=method == "json_mode")
    answer: Any = chain.invoke("Weather as json, for 'Łódź', 3 days?")
    if method == "json_mode":
        assert json.loads(answer["raw"].content) == {}
    else:
        assert answer == Weather(**ARGUMENTS)  # type: ignore[arg-type]
