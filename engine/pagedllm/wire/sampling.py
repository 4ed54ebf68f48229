"""SamplingParams and CacheHints <-> fields of a request's body."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from ..errors import InvalidRequestError
from ..hints import CacheHints, Retain
from ..sampling_params import SamplingParams
from .body import Body
from .messages import decode_ttl
from .records import to_record

__all__ = ["Kind", "decode_hints", "decode_sampling", "encode_hints", "encode_sampling"]

Kind = Literal["chat", "completion"]

# The same name on both sides.
_SAME = (
    *("n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "stop_token_ids", "ignore_eos", "prompt_logprobs"),
)
_DEFAULTS = SamplingParams()
_MAX_TOP_LOGPROBS = 20
_COMPLETION_MAX_TOKENS = 16  # OpenAI's default


def encode_sampling(params: SamplingParams, kind: Kind) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    fields = {name: getattr(params, name) for name in _SAME if getattr(params, name) != getattr(_DEFAULTS, name)}
    if params.stop_token_ids:
        fields["stop_token_ids"] = list(params.stop_token_ids)
    if params.stop:
        fields["stop"] = list(params.stop)
    if params.logit_bias:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in dict(params.logit_bias).items()}
    if kind == "completion":
        fields["max_tokens"] = params.max_tokens  # null asks for the rest of the context, as with vLLM
        if params.logprobs is not None:
            fields["logprobs"] = params.logprobs
        return fields
    if params.max_tokens is not None:
        fields["max_tokens"] = params.max_tokens
    if params.logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": params.logprobs}
    return fields


def decode_sampling(body: Body, kind: Kind) -> SamplingParams:
    """Takes the fields out of the body; ``echo`` with ``logprobs`` asks for those of the prompt too."""
    options = {name: value for name in _SAME if (value := body.take(name)) is not None}
    stop = body.take("stop")
    options["stop"] = (stop,) if isinstance(stop, str) else stop or ()
    options["logit_bias"] = _decode_bias(body.take("logit_bias"))
    options["max_tokens"] = _decode_max_tokens(body, kind)
    options["logprobs"] = _decode_chat_logprobs(body) if kind == "chat" else body.take_as(int, "logprobs")
    return SamplingParams(**options)


def encode_hints(hints: CacheHints) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    fields: dict[str, Any] = {}
    if hints.salt is not None:
        fields["cache_salt"] = hints.salt
    if hints.priority:
        fields["priority"] = hints.priority
    if hints.prefix_key is not None:
        fields["prompt_cache_key"] = hints.prefix_key
    wishes: dict[str, Any] = {}
    if hints.retain:
        wishes["retain"] = [
            {name: value for name, value in to_record(place).items() if value is not None} for place in hints.retain
        ]
    wishes |= {name: True for name in ("release", "warm") if getattr(hints, name)}
    return fields | ({"cache_hints": wishes} if wishes else {})


def decode_hints(body: Body, breakpoints: Sequence[Retain] = ()) -> CacheHints:
    """Takes the fields out of the body.

    Args:
        breakpoints: Where ``cache_control`` stands in the messages; they come before those of ``cache_hints``.
    """
    wishes = Body(body.take("cache_hints") or {}, "cache_hints")
    retain = [*breakpoints, *(_decode_retain(item) for item in wishes.take_as(list, "retain", []))]
    retention = body.take("prompt_cache_retention")
    if retention == "24h":
        retain.append(Retain(ttl_s=86400.0))
    elif retention not in (None, "in-memory", "in_memory"):
        allowed = "must be '24h' or 'in-memory'"
        raise InvalidRequestError.for_value("prompt_cache_retention", retention, allowed)
    hints = CacheHints(
        salt=body.take("cache_salt"),
        retain=tuple(retain),
        release=wishes.take_as(bool, "release", False),
        warm=wishes.take_as(bool, "warm", False),
        priority=body.take_as(int, "priority", 0),
        prefix_key=body.take("prompt_cache_key"),
    )
    wishes.close()
    return hints


def _decode_retain(value: Any) -> Retain:
    body = Body(value, "cache_hints.retain")
    fields = {field.name: body.take(field.name) for field in dataclasses.fields(Retain) if field.name != "ttl_s"}
    place = Retain(**fields, ttl_s=decode_ttl(body.take("ttl_s"), "cache_hints.retain.ttl_s"))
    body.close()
    return place


def _decode_max_tokens(body: Body, kind: Kind) -> int | None:
    """``max_tokens`` is the older name of ``max_completion_tokens``; both may be given if they agree."""
    is_null = body.has_null("max_tokens")
    old, new = body.take_as(int, "max_tokens"), body.take_as(int, "max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise InvalidRequestError.for_value("max_tokens", old, f"contradicts max_completion_tokens={new}")
    chosen = new if old is None else old
    if chosen is None and kind == "completion" and not is_null:
        return _COMPLETION_MAX_TOKENS
    return chosen


def _decode_chat_logprobs(body: Body) -> int | None:
    """Chats say whether (``logprobs``) and how many (``top_logprobs``)."""
    wanted, num_top = body.take_as(bool, "logprobs", False), body.take_as(int, "top_logprobs")
    if num_top is not None and not 0 <= num_top <= _MAX_TOP_LOGPROBS:
        allowed = f"must be a whole number between 0 and {_MAX_TOP_LOGPROBS}"
        raise InvalidRequestError.for_value("top_logprobs", num_top, allowed)
    if not wanted:
        if num_top:
            raise InvalidRequestError.for_value("top_logprobs", num_top, "needs logprobs=true")
        return None
    return num_top or 0


def _decode_bias(value: Any) -> dict[int, Any]:
    """JSON's names are strings; those here are token ids."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequestError.for_value("logit_bias", value, "must map token ids to numbers")
    bias: dict[int, Any] = {}
    for name, number in value.items():
        if not (name.isascii() and name.isdecimal() and len(name) < 20):
            raise InvalidRequestError.for_value("logit_bias", name, "must be a token id")
        bias[int(name)] = number
    return bias
