"""Tools and structured output: what is asked of the engine, and what its answers become."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessageChunk
from langchain_core.tools import tool
from langchain_core.utils.json import parse_partial_json
from pydantic import BaseModel
from typing_extensions import TypedDict

from langchain_pagedllm import ChatPagedLLM, PagedLLM
from langchain_pagedllm.answers import to_chat_chunks, to_chat_result
from langchain_pagedllm.tool_calls import StreamedCalls, _spoil
from pagedllm.api import Choice, Chunk, RequestOutput, StructuredOutput, Timings, ToolCall, ToolCallDelta, Usage
from pagedllm.errors import InvalidRequestError

USAGE = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=0)
TIMINGS = Timings(queue_s=0.0, ttft_s=0.1, total_s=0.2)


@tool
def look_up(place: str, days: int = 1) -> str:
    """Look the weather up."""
    return "fine"


class Person(BaseModel):
    """A person."""

    name: str
    born: int


class PersonDict(TypedDict):
    """A person."""

    name: str
    born: int


def streamed(*chunks: Chunk) -> AIMessageChunk:
    calls = StreamedCalls()
    total: Any = None
    for chunk in chunks:
        for piece in to_chat_chunks(chunk, calls, model_name="m", stream_usage=True):
            assert not (piece.message.content and piece.message.tool_call_chunks)  # type: ignore[attr-defined]
            total = piece.message if total is None else total + piece.message
    return total


def chunk(**fields: Any) -> Chunk:
    return Chunk(**{"request_id": "r", "text": "", "token_ids": (), **fields})


# --- What is asked ---


def test_bind_tools_reaches_the_engine(engine: FakeEngine, chat: ChatPagedLLM) -> None:
    bound = chat.bind_tools([look_up, Person], tool_choice="any", parallel_tool_calls=False)
    bound.invoke("Hello")
    request = engine.requests[-1]
    assert [item.name for item in request.tools] == ["look_up", "Person"]
    assert request.tools[0].schema["properties"]["days"]["type"] == "integer"
    assert (request.tool_choice, request.parallel_tool_calls) == ("required", False)
    chat.bind_tools([]).invoke("Hello")
    assert engine.requests[-1].tools == ()


@pytest.mark.parametrize(
    ("choice", "want"),
    [
        *((None, "auto"), ("auto", "auto"), ("none", "none"), ("any", "required"), (True, "required")),
        *(("required", "required"), ("look_up", "look_up")),
        ({"type": "function", "function": {"name": "look_up"}}, "look_up"),
        ({"type": "tool", "name": "look_up"}, "look_up"),
    ],
)
def test_tool_choice(choice: Any, want: str, engine: FakeEngine, chat: ChatPagedLLM) -> None:
    chat.bind_tools([look_up], tool_choice=choice).invoke("Hello")
    assert engine.requests[-1].tool_choice == want


def test_wrong_choice_or_tool_is_named_when_bound(chat: ChatPagedLLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"tool_choice='serch'.*look_up"):
        chat.bind_tools([look_up], tool_choice="serch")
    with pytest.raises(InvalidRequestError, match="runs no tools of its own"):
        chat.bind_tools([{"type": "web_search_preview"}])


@pytest.mark.parametrize("place", ["dictionary", "extras"])
def test_a_marker_on_a_tool_keeps_all_tools(place: str, engine: FakeEngine, chat: ChatPagedLLM) -> None:
    """LangChain's own conversion drops it."""
    control = {"type": "ephemeral", "ttl": "1h"}
    marked: Any = {"name": "f", "description": "d", "parameters": {"type": "object"}, "cache_control": control}
    if place == "extras":
        marked = look_up.model_copy(update={"extras": {"cache_control": control}})
    chat.bind_tools([Person, marked]).invoke([("system", "Be brief."), ("human", "Hello")])
    [kept] = engine.requests[-1].hints.retain
    assert (kept.message_index, kept.num_chars, kept.ttl_s) == (1, 0, 3600.0)


@pytest.mark.parametrize("schema", [Person, PersonDict, {"title": "P", **Person.model_json_schema()}])
def test_structured_output_reaches_the_engine(schema: Any, engine: FakeEngine, chat: ChatPagedLLM) -> None:
    for method in ("json_schema", "function_calling", "json_mode"):
        chat.with_structured_output(schema, method=method, include_raw=True).invoke("Hello")  # type: ignore[arg-type]
        request = engine.requests[-1]
        if method == "function_calling":
            assert request.tool_choice == request.tools[0].name
            continue
        assert request.structured_output is not None
        asked = json.loads(str(request.structured_output.json_schema))
        assert "born" in asked["properties"]
    chat.with_structured_output(method="json_mode", include_raw=True).invoke("Hello")
    assert engine.requests[-1].structured_output == StructuredOutput(json_schema=True)


def test_wrong_formats_are_named(chat: ChatPagedLLM) -> None:
    for options, match in (
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"lark": "a"}}, "lark"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "not both"),
    ):
        with pytest.raises(InvalidRequestError, match=match):
            chat.invoke("Hello", **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="method='xml'"):
        chat.with_structured_output(Person, method="xml")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="schema"):
        chat.with_structured_output(None)


def test_completions_take_structures(engine: FakeEngine, llm: PagedLLM) -> None:
    llm.invoke("Yes or no?", structured_outputs={"choice": ["yes", "no"]})
    assert engine.requests[-1].structured_output is not None
    assert engine.requests[-1].structured_output.choice == ("yes", "no")


# --- What comes back ---


def test_whole_and_broken_calls() -> None:
    calls = (
        ToolCall(id="1", name="f", arguments='{"place": "東京"}'),
        ToolCall(id="2", name="f", arguments="[3]"),
        ToolCall(id="3", name="f", arguments="{nonsense"),
    )
    choice = Choice(text="", token_ids=(), finish_reason="tool_calls", tool_calls=calls, reasoning="Hm.")
    output = RequestOutput(request_id="r", choices=(choice,), usage=USAGE, timings=TIMINGS)
    message: Any = to_chat_result(output, model_name="m").generations[0].message
    assert message.tool_calls == [{"name": "f", "args": {"place": "東京"}, "id": "1", "type": "tool_call"}]
    assert [item["id"] for item in message.invalid_tool_calls] == ["2", "3"]
    assert message.content_blocks[0] == {"type": "reasoning", "reasoning": "Hm."}


def test_a_cut_call_is_never_completed() -> None:
    """LangChain would close the brackets of a streamed one, and an agent would carry half of it out."""
    piece = '{"path": "/home/ada/old'
    choice = Choice(
        text="", token_ids=(), finish_reason="length", tool_calls=(ToolCall(id="1", name="f", arguments=piece),)
    )
    output = RequestOutput(request_id="r", choices=(choice,), usage=USAGE, timings=TIMINGS)
    message: Any = to_chat_result(output, model_name="m").generations[0].message
    assert (message.tool_calls, message.invalid_tool_calls[0]["args"]) == ([], piece)
    total = streamed(
        chunk(tool_calls=(ToolCallDelta(index=0, id="1", name="f"),)),
        chunk(tool_calls=(ToolCallDelta(index=0, arguments=piece),)),
        chunk(finish_reason="length", usage=USAGE, timings=TIMINGS),
    )
    assert total.tool_calls == []
    assert total.invalid_tool_calls[0]["args"].startswith(piece)  # type: ignore[union-attr]
    assert total.response_metadata["finish_reason"] == "length"


_JSON = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), _JSON, max_size=3), st.data(), st.booleans())
def test_no_parser_completes_a_spoiled_piece(value: dict[str, Any], data: st.DataObject, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    piece = text[: data.draw(st.integers(0, len(text)))]
    try:
        completed = parse_partial_json(piece + _spoil(piece))
    except ValueError:
        return
    assert not isinstance(completed, dict)


def test_streamed_pieces_join_to_what_the_model_wrote() -> None:
    total = streamed(
        chunk(reasoning="Hm, "),
        chunk(reasoning="yes."),
        chunk(text="I look.", tool_calls=(ToolCallDelta(index=0, id="1", name="f", arguments='{"a'),)),
        chunk(tool_calls=(ToolCallDelta(index=0, arguments='": 1}'), ToolCallDelta(index=1, id="2", name="g"))),
        chunk(tool_calls=(ToolCallDelta(index=1, arguments="{}"),)),
        chunk(finish_reason="tool_calls", usage=USAGE, timings=TIMINGS),
    )
    assert total.text == "I look."
    assert total.additional_kwargs["reasoning_content"] == "Hm, yes."
    assert [(call["name"], call["args"], call["id"]) for call in total.tool_calls] == [
        ("f", {"a": 1}, "1"),
        ("g", {}, "2"),
    ]
    assert [item["args"] for item in total.tool_call_chunks] == ['{"a": 1}', "{}"]
