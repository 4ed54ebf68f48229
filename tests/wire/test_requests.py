"""What bodies of clients mean, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from pagedllm.api import GenerateRequest, Message, Retain, StructuredOutput, Tool
from pagedllm.errors import InvalidRequestError
from pagedllm.wire import HARMLESS_FIELDS, decode_call, encode_call, parse_json

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
        (CHAT | {"tools": [{"type": "function"}]}, "tools"),
        (CHAT | {"response_format": {"type": "json_object"}}, "response_format"),
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
        tool_choice="none",
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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", (Tool(name="look", parameters={"type": "object"}),)),
        ("structured_output", StructuredOutput(regex="a")),
    ],
)
def test_what_does_not_go_over_the_wire_is_refused(field: str, value: object):
    """Dropped silently, a server would answer freely where a schema was asked for."""
    request = GenerateRequest(messages=(Message(role="user", content="x"),), **{field: value})
    with pytest.raises(InvalidRequestError, match=field):
        encode_call(request)
