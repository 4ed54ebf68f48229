"""Bounds on what one request may ask for, checked before anything is made of it."""

from __future__ import annotations

from typing import Any

from ..errors import InvalidRequestError
from ..wire import GenerateCall
from .config import ServerConfig

__all__ = ["check_body", "check_call"]


def check_body(body: Any, config: ServerConfig) -> None:
    """Bound how much a body fans out before there is a request for each piece."""
    if not isinstance(body, dict):
        return  # refused by who reads it
    prompt, n = body.get("prompt"), body.get("n")
    num_prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    _check("prompt", num_prompts, config.max_prompts, "prompts")
    if isinstance(n, int):
        _check("n", num_prompts * n, config.max_choices, "texts (prompts times n)")
    bias = body.get("logit_bias")
    if isinstance(bias, dict):
        _check("logit_bias", len(bias), config.max_logit_bias, "biased tokens")


def check_call(call: GenerateCall, config: ServerConfig) -> None:
    """Bound what costs time in every step."""
    for stop in call.requests[0].sampling.stop:
        _check("stop", len(stop), config.max_stop_chars, "characters in a stop string")


def _check(param: str, number: int, limit: int, what: str) -> None:
    if number > limit:
        raise InvalidRequestError(f"{param}: {number} {what}; this server takes at most {limit}", param=param)
