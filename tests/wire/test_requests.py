"""What bodies of clients mean, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from pagedllm.api import Chunk, GenerateRequest, Message, Retain, StructuredOutput, Tool, ToolCall, ToolCallDelta
from pagedllm.assemble import assemble_output
from pagedllm.errors import InvalidRequestError
from pagedllm.wire import (
    HARMLESS_FIELDS,
    AnswerForm,
    StreamDecoder,
    StreamEncoder,
    decode_call,
    decode_outputs,
    decode_tokenize_call,
    encode_call,
    encode_count_call,
    parse_json,
)

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"prompt": "hi"}


def chat(**fields: Any) -> Any:
    return decode_call(CHAT | fields, "chat")


def completion(**fields: Any) -> Any:
    return decode_call(COMPLETION | fields, "completion")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (CHAT | {"max_tokenz": 5}, "max_tokenz"),
        (CHAT | {"functions": [{"name": "f"}]}, "functions"),
        (CHAT | {"echo": True}, "echo"),
        (CHAT | {"logprobs": 3}, "logprobs"),
        (CHAT | {"top_logprobs": 3}, "top_logprobs"),
        (CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT | {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        (CHAT | {"n": True}, "n"),
        (CHAT | {"n": 0}, "n"),
        (CHAT | {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT | {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        (CHAT | {"stream": 1}, "stream"),
        (CHAT | {"logit_bias": {"a": 1}}, "logit_bias"),
        (CHAT | {"logit_bias": {"-1": 1}}, "logit_bias"),
        (CHAT | {"logit_bias": [1]}, "logit_bias"),
        (CHAT | {"cache_salt": "a@b"}, "cache_salt"),
        (CHAT | {"cache_hints": {"pin": 1}}, "cache_hints.pin"),
        (CHAT | {"cache_hints": {"retain": [{"ttl": 3}]}}, "cache_hints.retain.ttl"),
        (CHAT | {"request_id": "a\nb"}, "request_id"),
        (CHAT | {"request_id": "a" * 129}, "request_id"),
        (CHAT | {"best_of": 3}, "best_of"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages.role"),
        ({"messages": [{"role": "user", "content": "hi", "colour": 1}]}, "messages[0].colour"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content.text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]}, "messages[0].content.x"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.content"),
    ],
)
def test_refused(body: dict[str, Any], param: str) -> None:
    """What is neither supported nor documented as harmless is an error that names it, never ignored."""
    with pytest.raises(InvalidRequestError) as caught:
        decode_call(body, "chat")
    assert caught.value.param == param
    assert param.rpartition(".")[2] in str(caught.value)


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], [""], "", ["a", 3], [1, "a"], [True], [[1], "a"], {"a": 1}, 3, [[1.5]]]
)
def test_prompts_that_are_none(prompt: Any) -> None:
    """An empty or mixed prompt must be refused, at once, before it reaches an engine."""
    with pytest.raises(InvalidRequestError):
        completion(prompt=prompt)


def test_shapes_of_a_prompt() -> None:
    assert [r.prompt for r in completion(prompt="a").requests] == ["a"]
    assert [r.prompt for r in completion(prompt=["a", "b"]).requests] == ["a", "b"]
    assert [r.prompt for r in completion(prompt=[1, 2]).requests] == [(1, 2)]
    assert [r.prompt for r in completion(prompt=[[1], [2]]).requests] == [(1,), (2,)]
    assert [r.request_id for r in completion(prompt=["a", "b"], request_id="x").requests] == ["x-0", "x-1"]


def test_defaults_are_openais() -> None:
    """A completion without max_tokens is 16 tokens long, a chat as long as the context allows."""
    assert completion().requests[0].sampling.max_tokens == 16
    assert completion(max_tokens=None).requests[0].sampling.max_tokens is None
    assert chat().requests[0].sampling.max_tokens is None
    assert chat(max_completion_tokens=7).requests[0].sampling.max_tokens == 7
    assert chat(logprobs=True).requests[0].sampling.logprobs == 0
    assert chat(logprobs=False, top_logprobs=0).requests[0].sampling.logprobs is None
    assert chat(stop="a").requests[0].sampling.stop == ("a",)


def test_harmless_and_neutral_fields() -> None:
    """Clients send these whether they need them or not."""
    call = chat(
        **dict.fromkeys(HARMLESS_FIELDS, "x"),
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        functions=None,
        best_of=1,
    )
    assert call.requests[0] == chat(request_id=call.request_id).requests[0]


def test_cache_control_marks_a_place() -> None:
    """A breakpoint lies behind its part, counted in characters of the message's joined text."""
    parts = [
        {"type": "text", "text": "abc", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "de"},
        {"type": "text", "text": "f", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ]
    body = {"messages": [{"role": "system", "content": parts}, *CHAT["messages"]], "cache_hints": {"retain": [{}]}}
    (request,) = decode_call(body, "chat").requests
    assert request.messages is not None
    assert request.messages[0].content == "abcdef"
    assert request.hints.retain == (
        Retain(message_index=0, num_chars=3, ttl_s=300.0),
        Retain(message_index=0, num_chars=6, ttl_s=3600.0),
        Retain(),
    )


@pytest.mark.parametrize("control", [{"type": "forever"}, {"type": "ephemeral", "ttl": "2d"}, "ephemeral", {"a": 1}])
def test_cache_control_refused(control: Any) -> None:
    part = {"type": "text", "text": "abc", "cache_control": control}
    with pytest.raises(InvalidRequestError, match="cache_control"):
        decode_call({"messages": [{"role": "user", "content": [part]}]}, "chat")


def test_retention_of_openai() -> None:
    assert chat(prompt_cache_retention="24h").requests[0].hints.retain == (Retain(ttl_s=86400.0),)
    assert chat(prompt_cache_retention="in-memory").requests[0].hints.retain == ()
    with pytest.raises(InvalidRequestError, match="prompt_cache_retention"):
        chat(prompt_cache_retention="1y")


def test_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    assert completion(echo=True, logprobs=2).requests[0].sampling.prompt_logprobs == 2


def test_turns_of_tools() -> None:
    """An assistant's call has no content, and the answer refers to it."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c", "name": "f"},
        {"role": "assistant", "refusal": None},
    ]
    (request,) = decode_call({"messages": CHAT["messages"] + turns}, "chat").requests
    assert request.messages is not None
    assert request.messages[1].tool_calls[0].name == "f"
    assert [message.content for message in request.messages[1:]] == ["", "4", ""]


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{", b'{"a": NaN}', b'{"a": Infinity}', b'{"a": 1e999}', b"\xff", b'{"a": "\\ud83d"}', b"[" * 100_000),
        *(b'{"a": ' + b"9" * 5000 + b"}", b'{"\\udfff": 1}'),
    ],
)
def test_text_that_is_no_json(text: bytes) -> None:
    """Bytes from anybody end in an error of the request, never in one of the server."""
    with pytest.raises(InvalidRequestError):
        parse_json(text)


def test_json_with_whole_emoji() -> None:
    assert parse_json(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}


@pytest.mark.parametrize("body", [[], "x", 3, None])
def test_body_that_is_no_object(body: Any) -> None:
    with pytest.raises(InvalidRequestError, match="object"):
        decode_call(body, "chat")


# --- Tools and forms of answers ---

FUNCTION: dict[str, Any] = {"name": "look", "parameters": {"type": "object", "properties": {"place": {}}}}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"größe": {"type": "integer"}}}


def test_tools_in_openais_words() -> None:
    named = {"type": "function", "function": {"name": "look"}}
    (request,) = chat(tools=[TOOL], tool_choice=named, parallel_tool_calls=False).requests
    assert request.tools == (Tool(name="look", parameters=FUNCTION["parameters"]),)
    assert (request.tool_choice, request.parallel_tool_calls) == ("look", False)
    for choice in ("auto", "none", "required"):
        assert chat(tools=[TOOL], tool_choice=choice).requests[0].tool_choice == choice
    bare = {"type": "function", "function": {"name": "now", "description": None, "parameters": None, "strict": True}}
    assert chat(tools=[bare]).requests[0].tools == (Tool(name="now", strict=True),)


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput(json_schema=True)),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, StructuredOutput(json_schema=SCHEMA)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            StructuredOutput(json_schema=SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutput(json_schema=SCHEMA)),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, StructuredOutput(json_schema={"type": "null"})),
        ({"structured_outputs": {"json_object": True}}, StructuredOutput(json_schema=True)),
        ({"structured_outputs": {"regex": "[a-z]"}}, StructuredOutput(regex="[a-z]")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutput(choice=("a", "b"))),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, StructuredOutput(grammar='root ::= "a"')),
    ],
)
def test_forms_of_answers(fields: dict[str, Any], want: StructuredOutput | None) -> None:
    """In both APIs: what OpenAI's clients, vLLM's and llama.cpp's send."""
    assert chat(**fields).requests[0].structured_output == want
    assert completion(**fields).requests[0].structured_output == want


def test_what_other_servers_understand() -> None:
    """A chat's JSON goes out in OpenAI's words: few servers know vLLM's."""
    turns = (Message(role="user", content="x"),)
    body = encode_call(GenerateRequest(messages=turns, structured_output=StructuredOutput(json_schema=SCHEMA)))
    assert body["response_format"]["json_schema"]["schema"] == SCHEMA
    body = encode_call(GenerateRequest(messages=turns, structured_output=StructuredOutput(json_schema=True)))
    assert body["response_format"] == {"type": "json_object"}
    body = encode_call(GenerateRequest(messages=turns, tools=(Tool(name="look"),), tool_choice="look"))
    assert body["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert "strict" not in body["tools"][0]["function"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "function"}]}, "tools[1].function"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "returns": {}}}]}, "tools[0].function.returns"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": "{}"}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.name"),
        ({"tools": [TOOL], "tool_choice": "look_up"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"tools": [TOOL], "min_tokens": 3}, "min_tokens"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"choice": []}}, "structured_output"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    ],
)
def test_refused_tools_and_forms(fields: dict[str, Any], param: str) -> None:
    """Left out without a word, a free answer would look like one that was held to what was asked for."""
    with pytest.raises(InvalidRequestError) as caught:
        chat(**fields)
    assert caught.value.param == param


def test_a_completion_takes_no_tools() -> None:
    with pytest.raises(InvalidRequestError, match="tools are for messages"):
        completion(tools=[TOOL])


def test_thoughts_of_earlier_turns_are_left_aside() -> None:
    """Clients send back the message that they got."""
    turn = {"role": "assistant", "content": "4", "reasoning_content": "2 + 2", "tool_calls": None}
    assert chat(messages=[*CHAT["messages"], turn]).requests[0].messages[1].content == "4"


def test_tools_are_counted() -> None:
    """They are a part of the prompt, so that a count without them is too small."""
    turns = (Message(role="user", content="x"),)
    body = encode_count_call(GenerateRequest(messages=turns, tools=(Tool(name="look"),)))
    call = decode_tokenize_call(body)
    assert call.request is not None
    assert call.request.tools == (Tool(name="look"),)


# --- Calls in the answers of other servers ---


def piece(**delta: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def test_calls_of_a_server_that_is_not_ours() -> None:
    """Some repeat the name, leave out the id, or end with "stop": a call that is whole must not look cut."""
    decoder = StreamDecoder("r")
    function = {"name": "look", "arguments": ""}
    events = [
        piece(role="assistant", content=None, tool_calls=[{"index": 0, "type": "function", "function": function}]),
        piece(tool_calls=[{"index": 0, "function": {"name": "look", "arguments": '{"place"'}}]),
        piece(tool_calls=[{"index": 0, "function": {"name": None, "arguments": ": 1}"}}]),
        {"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    ]
    chunks = [chunk for event in events for chunk in decoder.decode(event)] + decoder.finish()
    [choice] = assemble_output(chunks).choices
    assert choice.tool_calls == (ToolCall(id="call_0", name="look", arguments='{"place": 1}'),)
    assert choice.finish_reason == "tool_calls"
    message = {"content": None, "tool_calls": [{"id": "c", "function": {"name": "look", "arguments": "{}"}}]}
    (output,) = decode_outputs({"id": "x", "choices": [{"message": message, "finish_reason": "stop"}]})
    assert (output.choices[0].finish_reason, output.text) == ("tool_calls", "")


def test_pieces_of_one_event_are_one_for_each_call() -> None:
    """Clients join what comes in different events: two pieces of a call in one would be two calls."""
    deltas = (
        ToolCallDelta(index=0, id="a", name="f"),
        ToolCallDelta(index=0, arguments="{}"),
        ToolCallDelta(index=1, id="b", name="g"),
        ToolCallDelta(index=1, arguments='{"x'),
    )
    form = AnswerForm(kind="chat", request_id="r", model="m", created=1)
    [event] = StreamEncoder(form).encode(Chunk(request_id="r", text="", token_ids=(1,), tool_calls=deltas))
    assert event["choices"][0]["delta"] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            {"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": '{"x'}},
        ],
    }
