"""A chat's messages, brought into one form at the border."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import InvalidRequestError
from .sampling_params import as_tuple

__all__ = ["Message", "ToolCall"]


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call that an assistant asked for.

    Args:
        id: Names the call in the answer to it.
        name: Of the function.
        arguments: JSON, exactly as the model wrote it: possibly not valid.
    """

    id: str
    name: str
    arguments: str

    def __post_init__(self) -> None:
        for field in ("id", "name", "arguments"):
            value = getattr(self, field)
            if not isinstance(value, str):
                raise InvalidRequestError.for_value(f"messages.tool_calls.{field}", value, "must be a string")
            _unicode(f"messages.tool_calls.{field}", value)
        if not self.name:
            raise InvalidRequestError.for_value("messages.tool_calls.name", self.name, "must not be empty")


@dataclass(frozen=True, kw_only=True, init=False)
class Message:
    """One turn of a chat.

    Args:
        role: Such as ``"system"``, ``"user"``, ``"assistant"`` or ``"tool"``; the chat template knows which there are.
        content: Text; or a list of texts and ``{"type": "text", "text": ...}`` parts, kept as the text they join to;
            or None, kept as an empty text.
        tool_calls: Calls that an assistant's turn asks for, besides or instead of text.
        tool_call_id: Which call a tool's turn answers.

    Raises:
        InvalidRequestError: Naming the kind of part that is not text, the place of a lone surrogate, or a field that
            does not go with the role.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    def __init__(
        self,
        *,
        role: str,
        content: str | Sequence[str | Mapping[str, Any]] | None = None,
        tool_calls: Sequence[ToolCall] = (),
        tool_call_id: str | None = None,
    ) -> None:
        if not isinstance(role, str) or not role:
            raise InvalidRequestError.for_value("messages.role", role, "must be a non-empty string")
        calls = as_tuple("messages.tool_calls", tool_calls, ToolCall)
        if calls and role != "assistant":
            raise InvalidRequestError(f"messages.tool_calls: only an assistant calls, not {role!r}", param="messages")
        if tool_call_id is not None and (not isinstance(tool_call_id, str) or role != "tool"):
            allowed = "must be a string, in a message with the role 'tool'"
            raise InvalidRequestError.for_value("messages.tool_call_id", tool_call_id, allowed)
        if tool_call_id is not None:
            _unicode("messages.tool_call_id", tool_call_id)
        object.__setattr__(self, "role", _unicode("messages.role", role))
        object.__setattr__(self, "content", _unicode("messages.content", _joined_text(content)))
        object.__setattr__(self, "tool_calls", calls)
        object.__setattr__(self, "tool_call_id", tool_call_id)


def _joined_text(content: Any) -> str:
    """A message's content as one text; parts join without anything between, as the caller would have written them."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, (list, tuple)):
        allowed = "must be a string, a list of text parts, or None"
        raise InvalidRequestError.for_value("messages.content", content, allowed)
    return "".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidRequestError.for_value("messages.content", part, "a part must be a text or a text part")
    kind = part.get("type", "text")
    if kind != "text":
        raise InvalidRequestError(f"content part of type {kind!r} is not supported: only text", param="messages")
    text = part.get("text", part)
    if not (text is None or isinstance(text, str)):
        raise InvalidRequestError.for_value("messages.content", text, "the 'text' of a part must be a string")
    return text or ""


def _unicode(param: str, text: str) -> str:
    """The text, if it has a UTF-8: JSON can carry half an emoji, which is no character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{param} is not valid Unicode: a lone surrogate at position {error.start}", param=param
        ) from error
    return text
