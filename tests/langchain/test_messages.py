"""LangChain messages on their way to the engine."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from langchain_pagedllm.messages import to_messages
from pagedllm.api import Message
from pagedllm.errors import InvalidRequestError


def converted(*messages: BaseMessage) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in to_messages(messages)]


def test_roles() -> None:
    messages = [
        SystemMessage("s"),
        HumanMessage("h", name="Ann"),
        AIMessage("a"),
        ChatMessage(role="critic", content="c"),
    ]
    assert converted(*messages) == [("system", "s"), ("user", "h"), ("assistant", "a"), ("critic", "c")]
    assert isinstance(to_messages(messages)[0], Message)


def test_neighbours_of_one_role_are_merged() -> None:
    """Chat templates that demand alternation raise on two system or human messages in a row."""
    got = converted(
        SystemMessage("1"), SystemMessage("2"), HumanMessage("3"), HumanMessage(""), HumanMessage("4"), AIMessage("5")
    )
    assert got == [("system", "1\n2"), ("user", "3\n4"), ("assistant", "5")]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        ([], ""),
        (["a", "b"], "ab"),
        (
            [{"type": "text", "text": "a"}, "b", {"type": "text", "text": "c", "cache_control": {"type": "ephemeral"}}],
            "abc",
        ),
        ([{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "a"}], "a"),
        ([{"type": "reasoning", "reasoning": "hm"}, {"type": "redacted_thinking", "data": "x"}], ""),
        ([{"type": "text", "text": None}], ""),
    ],
)
def test_content(content: Any, text: str) -> None:
    assert converted(AIMessage(content)) == [("assistant", text)]


def test_content_none_is_empty() -> None:
    """OpenAI's clients send null beside tool calls; templates concatenate strings and raise TypeError on it."""
    message = AIMessage("x")
    message.content = None  # type: ignore[assignment]
    assert converted(message) == [("assistant", "")]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (HumanMessage([{"type": "image_url", "image_url": {"url": "x"}}]), "'image_url'"),
        (HumanMessage([{"type": "audio", "base64": "x"}]), "'audio'"),
        (HumanMessage([{"type": "text", "text": 3}]), "'text'"),
        (ToolMessage("x", tool_call_id="1"), "ToolMessage"),
        (FunctionMessage("x", name="f"), "FunctionMessage"),
        (RemoveMessage(id="1"), "RemoveMessage"),
        (AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": "1"}]), "AIMessage with tool_calls"),
    ],
)
def test_what_cannot_be_said_is_named(message: BaseMessage, named: str) -> None:
    """A part that is dropped in silence makes the model answer another question."""
    with pytest.raises(InvalidRequestError, match=named):
        to_messages([message])
