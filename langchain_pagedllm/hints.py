"""Wishes about KV reuse: from Anthropic's and OpenAI's words for them to the engine's, and what became of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pagedllm.api import HintOutcome, Message, Retain, Usage
from pagedllm.errors import InvalidRequestError

__all__ = ["breakpoint_ttl", "end_of_tools", "read_ttl", "to_prefix_cache", "tools_ttl"]

_TTLS = {"5m": 300.0, "1h": 3600.0}
_DEFAULT_TTL_S = 300.0


def read_ttl(cache_control: Any) -> float:
    """For how many seconds a ``cache_control`` asks: ``{"type": "ephemeral", "ttl": "5m" | "1h" | seconds}``.

    Raises:
        InvalidRequestError: It is something else.
    """
    allowed = "must be {'type': 'ephemeral'} with, if wanted, 'ttl': '5m', '1h' or a number of seconds"
    if not isinstance(cache_control, Mapping) or cache_control.get("type") != "ephemeral":
        raise InvalidRequestError.for_value("cache_control", cache_control, allowed)
    ttl = cache_control.get("ttl")
    if not set(cache_control) - {"type", "ttl"}:
        if ttl is None:
            return _DEFAULT_TTL_S
        if isinstance(ttl, str) and ttl in _TTLS:
            return _TTLS[ttl]
        if isinstance(ttl, (int, float)) and not isinstance(ttl, bool):
            return float(ttl)
    raise InvalidRequestError.for_value("cache_control", cache_control, allowed)


def breakpoint_ttl(marked: Mapping[str, Any]) -> float | None:
    """For how long a content part or a tool asks to keep what ends with it; None if it does not ask.

    ``cache_control`` and OpenAI's ``prompt_cache_breakpoint`` are read, beside the part's own keys or in ``extras``.
    """
    extras = marked.get("extras")
    for place in (marked, extras if isinstance(extras, Mapping) else {}):
        if (cache_control := place.get("cache_control")) is not None:
            return read_ttl(cache_control)
        if (explicit := place.get("prompt_cache_breakpoint")) is not None:
            if explicit != {"mode": "explicit"}:
                allowed = "must be {'mode': 'explicit'}"
                raise InvalidRequestError.for_value("prompt_cache_breakpoint", explicit, allowed)
            return _DEFAULT_TTL_S
    return None


def tools_ttl(tools: Sequence[Any]) -> float | None:
    """The longest time for which any of the tools asks to keep them; None if none asks."""
    markers = [tool if isinstance(tool, Mapping) else {"extras": getattr(tool, "extras", None)} for tool in tools]
    times = [ttl for ttl in map(breakpoint_ttl, markers) if ttl is not None]
    return max(times, default=None)


def end_of_tools(messages: Sequence[Message], ttl_s: float) -> Retain:
    """Keep the tools: chat templates write them before the first text that is not the system's."""
    for index, message in enumerate(messages):
        if message.role != "system":
            return Retain(message_index=index, num_chars=0, ttl_s=ttl_s)
    return Retain(message_index=len(messages) - 1, ttl_s=ttl_s)


def to_prefix_cache(usage: Usage, hints: Sequence[HintOutcome]) -> dict[str, Any]:
    """What the prefix cache did for a request, as an entry of its answer's metadata."""
    return {
        "cached_tokens": usage.cached_tokens,
        "created_tokens": usage.cache_creation_tokens,
        "hints": [dataclasses.asdict(outcome) for outcome in hints],
    }
