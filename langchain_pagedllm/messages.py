"""LangChain messages to the engine's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from pagedllm.api import Message, Retain, ToolCall
from pagedllm.errors import InvalidRequestError

from .hints import breakpoint_ttl

__all__ = ["Chat", "to_chat"]

_ROLES = ((SystemMessage, "system"), (HumanMessage, "user"), (AIMessage, "assistant"), (ToolMessage, "tool"))
# What a model thought in an earlier turn; chat templates do not expect it back.
_DROPPED_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
# Parts by which other models' answers have their tool calls in the content a second time.
_CALL_PARTS = frozenset({"tool_call", "invalid_tool_call", "tool_use", "function_call"})


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A chat as the engine takes it, and the places up to which its ``cache_control`` asks to keep it."""

    messages: tuple[Message, ...]
    retain: tuple[Retain, ...]


def to_chat(messages: Sequence[BaseMessage]) -> Chat:
    """Convert a chat.

    Neighbours of one role become one message, joined by a newline as ``merge_message_runs`` does: many chat templates
    raise unless the roles alternate. Tools' messages stay apart, and nothing is joined to an AI message with tool
    calls. ``name``, ``status`` and ``artifact`` are not passed on; chat templates have no place for them.

    Args:
        messages: System, human, AI, tool and role messages; content is a string or a list of strings and text parts.

    Raises:
        InvalidRequestError: Naming the message type or the content part that cannot be given to the model.
    """
    merged: list[Message] = []
    retain: list[Retain] = []
    for message in messages:
        turn = Message(
            role=_role(message),
            content=_content(message),
            tool_calls=_tool_calls(message),
            tool_call_id=message.tool_call_id if isinstance(message, ToolMessage) else None,
        )
        if merged and merged[-1].role == turn.role != "tool" and not merged[-1].tool_calls:
            before = merged.pop().content
            text = "\n".join(text for text in (before, turn.content) if text)
            num_before = len(text) - len(turn.content)
            turn = Message(role=turn.role, content=text, tool_calls=turn.tool_calls)
        else:
            num_before = 0
        retain += [
            Retain(message_index=len(merged), num_chars=num_before + num_chars, ttl_s=ttl_s)
            for num_chars, ttl_s in _breakpoints(message)
        ]
        merged.append(turn)
    return Chat(messages=tuple(merged), retain=tuple(retain))


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in _ROLES:
        if isinstance(message, kind):
            return role
    raise InvalidRequestError(
        f"{type(message).__name__} is not supported: only system, human, AI, tool and chat messages", param="messages"
    )


def _tool_calls(message: BaseMessage) -> list[ToolCall]:
    """An AI message's calls; also those that LangChain could not parse, as the model wrote them."""
    if not isinstance(message, AIMessage):
        return []
    calls = [
        ToolCall(id=call["id"] or "", name=call["name"], arguments=_to_json(call["args"]))
        for call in message.tool_calls
    ]
    invalid = [
        ToolCall(id=call["id"] or "", name=call["name"] or "", arguments=call["args"] or "")
        for call in message.invalid_tool_calls
    ]
    return calls + invalid


def _to_json(arguments: Any) -> str:
    try:
        return json.dumps(arguments, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError.for_value("messages.tool_calls.args", arguments, f"must be JSON: {error}") from error


def _content(message: BaseMessage) -> Any:
    """The content but for what only LangChain's messages have; the engine's message makes one text of it."""
    content: Any = message.content
    if not isinstance(content, list):
        return content
    return [part for part in content if not (isinstance(part, Mapping) and _is_dropped(part, message))]


def _breakpoints(message: BaseMessage) -> list[tuple[int, float]]:
    """Where ``cache_control`` stands: after how many characters of the message's text, and its seconds."""
    if not isinstance(message.content, list):
        return []
    places, num_chars = [], 0
    for part in message.content:
        if isinstance(part, str):
            num_chars += len(part)
            continue
        if part.get("type", "text") == "text":
            num_chars += len(part.get("text") or "")
        if (ttl_s := breakpoint_ttl(part)) is not None:
            places.append((num_chars, ttl_s))
    return places


def _is_dropped(part: Mapping[str, Any], message: BaseMessage) -> bool:
    if part.get("type") in _CALL_PARTS and isinstance(message, AIMessage):
        return part.get("call_id", part.get("id")) in _call_ids(message)
    return part.get("type") in _DROPPED_PARTS


def _call_ids(message: AIMessage) -> set[str | None]:
    return {call["id"] for call in (*message.tool_calls, *message.invalid_tool_calls)}
