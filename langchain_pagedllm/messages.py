"""LangChain messages to the engine's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
)

from pagedllm.api import Message
from pagedllm.errors import InvalidRequestError

__all__ = ["to_messages"]

# What a model thought in an earlier turn; chat templates do not expect it back.
_DROPPED_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning"})


def to_messages(messages: Sequence[BaseMessage]) -> tuple[Message, ...]:
    """Convert a chat.

    Neighbours of one role become one message, joined by a newline as ``merge_message_runs`` does: many chat templates
    raise unless the roles alternate. ``name`` is not passed on; chat templates have no place for it.

    Args:
        messages: System, human, AI and role messages; content is a string or a list of strings and text parts.

    Raises:
        InvalidRequestError: Naming the message type or the content part that cannot be given to the model.
    """
    merged: list[Message] = []
    for message in messages:
        turn = Message(role=_role(message), content=_content(message))
        if merged and merged[-1].role == turn.role:
            text = "\n".join(text for text in (merged.pop().content, turn.content) if text)
            turn = Message(role=turn.role, content=text)
        merged.append(turn)
    return tuple(merged)


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    if isinstance(message, SystemMessage):
        return "system"
    if isinstance(message, HumanMessage):
        return "user"
    if isinstance(message, AIMessage) and not message.tool_calls:
        return "assistant"
    what = f"{type(message).__name__} with tool_calls" if isinstance(message, AIMessage) else type(message).__name__
    raise InvalidRequestError(
        f"{what} is not supported yet: only system, human, AI and chat messages", param="messages"
    )


def _content(message: BaseMessage) -> Any:
    """The content but for what only LangChain's messages have; the engine's message makes one text of it."""
    content: Any = message.content
    if not isinstance(content, list):
        return content
    return [part for part in content if not (isinstance(part, Mapping) and part.get("type") in _DROPPED_PARTS)]
