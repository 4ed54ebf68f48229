"""Calls in answers <-> OpenAI's ``tool_calls``, whole and in pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..api import ToolCall, ToolCallDelta

__all__ = ["CallDecoder", "decode_calls", "encode_call_deltas", "encode_calls"]


def encode_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """As they stand in a message, a client's or an answer's."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def decode_calls(value: Sequence[Mapping[str, Any]] | None) -> tuple[ToolCall, ...]:
    """Those of an answer; what a server adds to them is left aside."""
    return tuple(
        ToolCall(
            id=call.get("id") or _unnamed(place),
            name=call["function"]["name"],
            arguments=call["function"].get("arguments") or "",
        )
        for place, call in enumerate(value or ())
    )


def encode_call_deltas(deltas: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
    """The pieces of one event: one for each call, because clients join those of different events only."""
    pieces: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        piece = pieces.setdefault(delta.index, {"index": delta.index, "function": {"arguments": ""}})
        if delta.name is not None:
            piece |= {"id": delta.id, "type": "function"}
            piece["function"] = {"name": delta.name, "arguments": ""}
        piece["function"]["arguments"] += delta.arguments
    return list(pieces.values())


class CallDecoder:
    """Reads the pieces of one choice's calls. Some servers repeat the name and the id in each."""

    def __init__(self) -> None:
        self._begun: set[int] = set()

    @property
    def has_calls(self) -> bool:
        return bool(self._begun)

    def decode(self, value: Sequence[Mapping[str, Any]] | None) -> tuple[ToolCallDelta, ...]:
        """What is new of the calls."""
        return tuple(self._decode_piece(piece) for piece in value or ())

    def _decode_piece(self, piece: Mapping[str, Any]) -> ToolCallDelta:
        index = piece.get("index") or 0
        function = piece.get("function") or {}
        arguments = function.get("arguments") or ""
        if index in self._begun or not function.get("name"):
            return ToolCallDelta(index=index, arguments=arguments)
        self._begun.add(index)
        call_id = piece.get("id") or _unnamed(index)
        return ToolCallDelta(index=index, id=call_id, name=function["name"], arguments=arguments)


def _unnamed(place: int) -> str:
    """The id of a call to which the server gave none, though the answer to it must name it."""
    return f"call_{place}"
