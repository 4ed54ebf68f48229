"""How to choose tokens and when to stop, validated once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import InvalidRequestError

__all__ = ["SamplingParams", "as_tuple"]

_MAX_CHOICES = 128
_MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    The order is vLLM's: logit_bias and min_tokens, penalties, temperature, min_p, top_k, top_p. Logprobs are of the raw
    logits, before any of it.

    Args:
        n: Number of choices. Each has sampling noise of its own; they share the prompt's KV.
        max_tokens: Most tokens to generate; None: the rest of the context.
        min_tokens: No EOS, stop token or stop string ends the text before so many tokens; a stop string must lie in
            the text that comes after them.
        temperature: 0 (or below 1e-5) is greedy; None: the model's ``generation_config``, else 1.0.
        top_p: Keep the smallest set of tokens whose probability reaches this, in (0, 1]; None: the model's, else 1.0.
        top_k: Keep the most probable ``top_k`` tokens; 0 or -1 keeps all; None: the model's, else all.
        min_p: Keep tokens at least this share as probable as the most probable one, 0 to 1; 0 keeps all.
        presence_penalty: Subtracted once from the logit of each token in the completion so far, -2 to 2.
        frequency_penalty: Subtracted as often as the token occurs in the completion so far, -2 to 2.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt and completion; above
            0, 1 changes nothing.
        logit_bias: Added to the logits of some token ids, each -100 to 100.
        seed: Makes sampling repeatable: the noise depends only on seed and token position.
        stop: Up to 16 strings that end the text; matched on text and cut off exactly.
        stop_token_ids: Token ids that end the text, besides the model's own EOS ids.
        ignore_eos: Go on after an EOS id.
        logprobs: Report the log probability of each token and of this many most probable ones, 0 to 20; None: none.
        prompt_logprobs: Likewise for the tokens of the prompt. Such a request reads no cached prefix.

    Raises:
        InvalidRequestError: Naming the parameter, its value and what is allowed.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        # Lists and dicts are what callers have at hand; tuples are what a frozen, hashable value needs.
        object.__setattr__(self, "stop", as_tuple("stop", self.stop, str))
        object.__setattr__(self, "stop_token_ids", as_tuple("stop_token_ids", self.stop_token_ids, int))
        object.__setattr__(self, "logit_bias", _as_bias(self.logit_bias))
        self._check_counts()
        _check_float("temperature", self.temperature, "must be in [0, 10000]", lambda x: 0 <= x <= 10_000)
        _check_float("top_p", self.top_p, "must be in (0, 1]", lambda x: 0 < x <= 1)
        _check_float("min_p", self.min_p, "must be in [0, 1]", lambda x: 0 <= x <= 1)
        for name in ("presence_penalty", "frequency_penalty"):
            _check_float(name, getattr(self, name), "must be in [-2, 2]", lambda x: -2 <= x <= 2)
        _check_float("repetition_penalty", self.repetition_penalty, "must be a finite number above 0", lambda x: x > 0)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError.for_value("ignore_eos", self.ignore_eos, "must be True or False")
        if len(self.stop) > 16:
            raise InvalidRequestError.for_value("stop", self.stop, "at most 16 stop strings")
        if "" in self.stop:
            raise InvalidRequestError.for_value("stop", self.stop, "a stop string must not be empty")
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, minimum=0)

    def _check_counts(self) -> None:
        for name, minimum, maximum in (
            ("n", 1, _MAX_CHOICES),
            ("max_tokens", 1, None),
            ("min_tokens", 0, None),
            ("top_k", -1, None),
            ("seed", -(2**63), 2**64 - 1),
            ("logprobs", 0, _MAX_LOGPROBS),
            ("prompt_logprobs", 0, _MAX_LOGPROBS),
        ):
            value = getattr(self, name)
            if value is None and name in ("n", "min_tokens"):
                raise InvalidRequestError.for_value(name, value, "must be a whole number")
            _check_int(name, value, minimum=minimum, maximum=maximum)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError.for_value(
                "min_tokens", self.min_tokens, f"must not exceed max_tokens={self.max_tokens}"
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping of keyword options; an unknown one is an error that names it."""
        known = [item.name for item in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise InvalidRequestError(f"unknown option {name!r}; known: {', '.join(known)}", param=name)
        return cls(**options)


def as_tuple(param: str, value: Any, item_type: type) -> tuple[Any, ...]:
    """A list or tuple of one type as a tuple, else an error that names the parameter."""
    items = tuple(value) if isinstance(value, (list, tuple)) else None
    if items is None or any(not isinstance(item, item_type) or isinstance(item, bool) for item in items):
        raise InvalidRequestError.for_value(param, value, f"must be a list of {item_type.__name__}")
    return items


def _as_bias(value: Any) -> tuple[tuple[int, float], ...]:
    pairs = tuple(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, tuple) or any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise InvalidRequestError.for_value("logit_bias", value, "must map token ids to numbers")
    for token_id, bias in pairs:
        if token_id is None or bias is None:
            raise InvalidRequestError.for_value("logit_bias", value, "must map token ids to numbers")
        _check_int("logit_bias", token_id, minimum=0)
        _check_float("logit_bias", bias, "must be in [-100, 100]", lambda x: -100 <= x <= 100)
    return tuple(sorted(pairs))


def _check_int(param: str, value: Any, *, minimum: int, maximum: int | None = None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum or (maximum and value > maximum):
        limit = f"of at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        raise InvalidRequestError.for_value(param, value, f"must be a whole number {limit}")


def _check_float(param: str, value: Any, allowed: str, is_allowed: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidRequestError.for_value(param, value, allowed)
    if not is_allowed(value):
        raise InvalidRequestError.for_value(param, value, allowed)
