"""A chat's messages, brought into one form at the border."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import InvalidRequestError

__all__ = ["Message"]


@dataclass(frozen=True, kw_only=True, init=False)
class Message:
    """One turn of a chat.

    Args:
        role: Such as ``"system"``, ``"user"`` or ``"assistant"``; the chat template knows which there are.
        content: Text; or a list of texts and ``{"type": "text", "text": ...}`` parts, kept as the text they join to;
            or None, kept as an empty text.

    Raises:
        InvalidRequestError: Naming the kind of part that is not text, or the place of a lone surrogate.
    """

    role: str
    content: str

    def __init__(self, *, role: str, content: str | Sequence[str | Mapping[str, Any]] | None = None) -> None:
        if not isinstance(role, str) or not role:
            raise InvalidRequestError.for_value("messages.role", role, "must be a non-empty string")
        object.__setattr__(self, "role", _unicode("messages.role", role))
        object.__setattr__(self, "content", _unicode("messages.content", _joined_text(content)))


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
