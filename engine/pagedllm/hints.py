"""Wishes about KV reuse that travel with a request, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from .errors import InvalidRequestError
from .sampling_params import as_tuple

__all__ = ["CacheHints", "HintName", "HintOutcome", "Outcome", "Retain"]

HintName = Literal["retain", "release", "warm", "priority"]
Outcome = Literal["accepted", "clipped", "deferred", "rejected", "missing"]

_MAX_BREAKPOINTS = 16
_MAX_TTL_S = 7 * 86400.0


@dataclass(frozen=True, kw_only=True)
class Retain:
    """Pin the prompt's KV from its beginning up to a place, for a while after the request has computed it.

    The place is one of three: a number of tokens; a message of a chat, as a whole or its first characters; or, with
    none of them given, the prompt's end. Only full blocks are pinned, so it is rounded down to one.

    Args:
        num_tokens: Tokens of the prompt to keep.
        message_index: Last message to keep, counted from 0.
        num_chars: How much of that message's text to keep; None: all of it.
        ttl_s: Seconds for which to keep it, counted again from each request that renews it.
    """

    num_tokens: int | None = None
    message_index: int | None = None
    num_chars: int | None = None
    ttl_s: float = 300.0

    def __post_init__(self) -> None:
        for name, least in (("num_tokens", 1), ("message_index", 0), ("num_chars", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise InvalidRequestError.for_value(f"retain.{name}", value, f"must be a whole number from {least}")
        if self.num_tokens is not None and self.message_index is not None:
            raise InvalidRequestError("retain: give num_tokens or message_index, not both", param="retain")
        if self.num_chars is not None and self.message_index is None:
            raise InvalidRequestError("retain: num_chars is of a message: give message_index", param="retain")
        if not _is_number(self.ttl_s) or not 0 < self.ttl_s <= _MAX_TTL_S:
            raise InvalidRequestError.for_value("retain.ttl_s", self.ttl_s, f"must be above 0, at most {_MAX_TTL_S:g}")


@dataclass(frozen=True, kw_only=True)
class CacheHints:
    """Wishes about KV reuse. They change when a request is computed, never which tokens it gets.

    What became of each is told in the answer's ``hints``; a wish that cannot be met is never an error.

    Args:
        salt: Requests share cached prefixes only with requests of the same salt; None is a salt of its own.
        retain: Places up to which to pin the prompt.
        release: Drop the pins that were made under ``prefix_key``; without a key, those on this prompt's prefix.
        warm: Compute and cache the prompt, generate nothing.
        priority: Lower is sooner, under the scheduling policy ``priority``.
        prefix_key: Names a group of requests that share a prefix, such as a conversation: its pins can be released
            together, and a router may send it to one replica.

    Raises:
        InvalidRequestError: Naming the field.
    """

    salt: str | None = None
    retain: tuple[Retain, ...] = ()
    release: bool = False
    warm: bool = False
    priority: int = 0
    prefix_key: str | None = None

    def __post_init__(self) -> None:
        # vLLM's rule for the same field, so that a salt accepted here is accepted there.
        if self.salt is not None and (
            not isinstance(self.salt, str)
            or not 0 < len(self.salt) <= 128
            or any(char in "@/\\\0" for char in self.salt)
        ):
            raise InvalidRequestError.for_value(
                "cache_salt", self.salt, "must be 1 to 128 characters without '@', '/', '\\' and NUL"
            )
        object.__setattr__(self, "retain", as_tuple("retain", self.retain, Retain))
        if len(self.retain) > _MAX_BREAKPOINTS:
            raise InvalidRequestError.for_value(
                "retain", len(self.retain), f"must be at most {_MAX_BREAKPOINTS} places"
            )
        for name in ("release", "warm"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError.for_value(name, getattr(self, name), "must be True or False")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int) or abs(self.priority) > 2**31:
            raise InvalidRequestError.for_value("priority", self.priority, "must be a whole number of 32 bits")
        if self.prefix_key is not None and (
            not isinstance(self.prefix_key, str) or not 0 < len(self.prefix_key) <= 256
        ):
            raise InvalidRequestError.for_value("prefix_key", self.prefix_key, "must be 1 to 256 characters")


@dataclass(frozen=True, kw_only=True)
class HintOutcome:
    """What became of one hint.

    Args:
        hint: Which one; ``retain`` once for each place.
        outcome: ``accepted``: done. ``clipped``: done in part. ``deferred``: to be done when there is room.
            ``rejected``: this engine or its limits do not allow it. ``missing``: what it is about is not cached.
        num_tokens: How many tokens it reached: pinned, released or warmed.
        reason: Why it is not ``accepted``.
    """

    hint: HintName
    outcome: Outcome
    num_tokens: int = 0
    reason: str = ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
