"""A chat's messages <-> JSON. Breakpoints of the cache (``cache_control``) come with the parts that they follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import InvalidRequestError
from ..hints import Retain
from ..message import Message, ToolCall
from .body import Body
from .calls import encode_calls

__all__ = ["decode_messages", "decode_ttl", "encode_messages"]

# Anthropic's words for how long a breakpoint lives.
_TTLS = {"5m": 300.0, "1h": 3600.0}
_DEFAULT_TTL_S = 300.0
# Chat templates have no place for a name, and do not want what a model thought in an earlier turn.
_NOT_SHOWN = ("name", "reasoning", "reasoning_content")


def encode_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [_encode_message(message) for message in messages]


def decode_messages(value: Any) -> tuple[tuple[Message, ...], tuple[Retain, ...]]:
    """The messages, and where in them their ``cache_control`` asks for the prefix to be kept."""
    if not isinstance(value, list):
        raise InvalidRequestError.for_value("messages", value, "must be a list of messages")
    messages: list[Message] = []
    retain: list[Retain] = []
    for index, item in enumerate(value):
        message, breakpoints = _decode_message(item, index)
        messages.append(message)
        retain += breakpoints
    return tuple(messages), tuple(retain)


def _encode_message(message: Message) -> dict[str, Any]:
    encoded: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        encoded["tool_calls"] = encode_calls(message.tool_calls)
    if message.tool_call_id is not None:
        encoded["tool_call_id"] = message.tool_call_id
    return encoded


def _decode_message(value: Any, index: int) -> tuple[Message, list[Retain]]:
    body = Body(value, f"messages[{index}]")
    role = body.take_as(str, "role")
    content = body.take("content")
    content, retain = _decode_parts(content, index) if isinstance(content, list) else (content, [])
    calls = body.take_as(list, "tool_calls", [])
    message = Message(
        role=role,
        content=content,
        tool_calls=[_decode_call(call, f"messages[{index}].tool_calls") for call in calls],
        tool_call_id=body.take_as(str, "tool_call_id"),
    )
    # OpenAI's answers carry these, so they come back in the next request.
    for name in ("refusal", "audio", "annotations", "function_call"):
        body.take_neutral(name)
    body.close(harmless=_NOT_SHOWN)
    return message, retain


def _decode_call(value: Any, name: str) -> ToolCall:
    body = Body(value, name)
    call_id, kind = body.take_as(str, "id"), body.take_as(str, "type", "function")
    if kind != "function":
        raise InvalidRequestError.for_value(f"{name}.type", kind, "must be 'function'")
    function = Body(body.take("function"), f"{name}.function")
    call = ToolCall(id=call_id, name=function.take_as(str, "name"), arguments=function.take_as(str, "arguments", ""))
    function.close()
    body.close(harmless=("index",))
    return call


def _decode_parts(parts: list[Any], index: int) -> tuple[list[Any], list[Retain]]:
    """The texts of the parts; Message refuses those that are not text."""
    texts: list[Any] = []
    retain: list[Retain] = []
    num_chars = 0
    for part in parts:
        if not isinstance(part, dict):
            texts.append(part)
            num_chars += len(part) if isinstance(part, str) else 0
            continue
        body = Body(part, f"messages[{index}].content")
        cache_control = body.take("cache_control")
        kind, text = body.take_as(str, "type", "text"), body.take("text")
        if kind == "text":
            if not isinstance(text, str):
                raise InvalidRequestError.for_value(f"messages[{index}].content.text", text, "must be a string")
            body.close()
        texts.append({"type": kind, "text": text})
        num_chars += len(text) if isinstance(text, str) else 0
        if cache_control is not None:
            ttl_s = _decode_cache_control(cache_control, f"messages[{index}].content.cache_control")
            retain.append(Retain(message_index=index, num_chars=num_chars, ttl_s=ttl_s))
    return texts, retain


def _decode_cache_control(value: Any, name: str) -> float:
    body = Body(value, name)
    kind, ttl = body.take("type"), body.take("ttl")
    if kind != "ephemeral":
        raise InvalidRequestError.for_value(f"{name}.type", kind, "must be 'ephemeral'")
    body.close()
    return decode_ttl(ttl, f"{name}.ttl")


def decode_ttl(value: Any, name: str) -> float:
    """Seconds: ``"5m"``, ``"1h"`` or a number of them; None is five minutes."""
    if value is None:
        return _DEFAULT_TTL_S
    if isinstance(value, str) and value in _TTLS:
        return _TTLS[value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise InvalidRequestError.for_value(name, value, "must be '5m', '1h' or a number of seconds")
