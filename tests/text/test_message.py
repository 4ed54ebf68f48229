"""Messages in every shape that clients send, brought into one form."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from pagedllm.api import GenerateRequest, Message, ToolCall
from pagedllm.config import EngineConfig
from pagedllm.errors import ConfigError, InvalidRequestError

USER, ASSISTANT = Message(role="user", content="hi"), Message(role="assistant", content="OK! ")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        ("", ""),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, "b", {"text": " c", "cache_control": {"type": "ephemeral"}}], "ab c"),
        (({"type": "text", "text": None},), ""),
    ],
)
def test_row_42_content_is_one_text(content: Any, text: str) -> None:
    """Templates concatenate strings: None and lists make theirs raise TypeError, or vanish in silence."""
    message = Message(role="user", content=content)
    assert message.content == text
    assert message == Message(role="user", content=text)
    assert hash(message) == hash(Message(role="user", content=text))
    assert pickle.loads(pickle.dumps(message)) == copy.deepcopy(message) == dataclasses.replace(message) == message


def test_row_42_content_may_be_absent() -> None:
    assert Message(role="assistant") == Message(role="assistant", content="")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "part of type 'image_url' is not supported"),
        ([{"type": "input_audio"}], "'input_audio'"),
        ([{"type": None, "text": "x"}], "None"),
        ([{"type": "text", "text": 3}], "'text' of a part must be a string"),
        ([{"type": "text"}], "'text' of a part must be a string"),
        ([5], "messages.content=5"),
        ([None], "messages.content=None"),
        (5, "messages.content=5.*string, a list of text parts, or None"),
        ({"type": "text", "text": "a"}, "list of text parts"),
        (b"x", "messages.content=b'x'"),
        ("x \ud83d", r"messages\.content is not valid Unicode: a lone surrogate at position 2"),
        (["\ud83d", "\ude00"], "lone surrogate at position 0"),
    ],
)
def test_what_is_no_text_is_named(content: Any, message: str) -> None:
    """A part that is dropped in silence makes the model answer another question."""
    with pytest.raises(InvalidRequestError, match=message):
        Message(role="user", content=content)


@pytest.mark.parametrize("role", ["", None, 5, "us\ud800er"])
def test_roles(role: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\.role"):
        Message(role=role, content="x")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id": None}, r"tool_calls\.id=None"),
        ({"arguments": {"a": 1}}, r"tool_calls\.arguments=.*must be a string"),
        ({"name": ""}, r"tool_calls\.name='': must not be empty"),
        ({"arguments": "\ud83d"}, r"tool_calls\.arguments.*surrogate"),
    ],
)
def test_tool_calls(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        ToolCall(**{"id": "1", "name": "f", "arguments": "{}", **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"role": "user", "tool_calls": [ToolCall(id="1", name="f", arguments="{}")]}, "only an assistant calls"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "tool_calls"),
        ({"role": "assistant", "tool_call_id": "1"}, r"tool_call_id='1'.*role 'tool'"),
        ({"role": "tool", "tool_call_id": "x\ud83d"}, r"tool_call_id.*surrogate at position 1"),
    ],
)
def test_fields_of_tools(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        Message(content="x", **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [ASSISTANT], "continue_final_message": True}, "set add_generation_prompt to False"),
        (
            {"messages": [USER], "continue_final_message": True, "add_generation_prompt": False},
            "last message must be the assistant's, not 'user'",
        ),
        ({"messages": [USER], "continue_final_message": "yes"}, "continue_final_message='yes'"),
        ({"messages": [USER], "add_generation_prompt": None}, "add_generation_prompt=None"),
        ({"messages": [USER], "parse_special_tokens": 1}, "parse_special_tokens=1"),
        ({"prompt": "x", "continue_final_message": True}, "continue_final_message is for messages"),
        ({"prompt": "x", "add_generation_prompt": False}, "add_generation_prompt is for messages"),
        ({"prompt": [1, 2], "parse_special_tokens": False}, "token ids"),
    ],
)
def test_options_that_do_not_go_together(fields: dict[str, Any], message: str) -> None:
    """An option that is accepted and ignored is a bug that nobody finds."""
    with pytest.raises(InvalidRequestError, match=message):
        GenerateRequest(**fields)


def test_options_that_do() -> None:
    GenerateRequest(messages=(USER, ASSISTANT), continue_final_message=True, add_generation_prompt=False)
    GenerateRequest(messages=(USER,), add_generation_prompt=False, parse_special_tokens=True)
    assert GenerateRequest(prompt="x", parse_special_tokens=False).parse_special_tokens is False


def test_template_options_make_one_key() -> None:
    """The configuration finds the engine: the same options must be the same key."""
    first = EngineConfig(chat_template="{{ x }}", chat_template_kwargs={"b": 1, "a": None})
    second = EngineConfig(chat_template="{{ x }}", chat_template_kwargs={"a": None, "b": 1})
    assert first == second == dataclasses.replace(first) == pickle.loads(pickle.dumps(first))
    assert hash(first) == hash(second)
    assert first.chat_template_kwargs == (("a", None), ("b", 1))
    assert first != EngineConfig(chat_template="{{ x }}", chat_template_kwargs={"b": 2, "a": None})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_template": ""}, "chat_template=''"),
        ({"chat_template": 5}, "chat_template=5"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs=5"),
        ({"chat_template_kwargs": ["ab", 5]}, "chat_template_kwargs="),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs='messages'.*none of"),
        ({"chat_template_kwargs": {"not a name": 1}}, "'not a name'"),
        ({"chat_template_kwargs": {5: 1}}, "chat_template_kwargs=5"),
        ({"chat_template_kwargs": {"a": [1]}}, r"\{'a': \[1\]\}"),
        ({"chat_template_kwargs": {"a": float("nan")}}, "nan"),
    ],
)
def test_template_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)
