"""Prompts that completions begin with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..api import Engine, GenerateRequest, TokenLogprob
from ..wire import Echo

__all__ = ["echo_of", "make_echo"]


def make_echo(engine: Engine, request: GenerateRequest) -> Echo:
    """The text of a request's prompt; with log probabilities also of its first token, which has none itself."""
    prompt = request.prompt
    assert prompt is not None
    text = prompt if isinstance(prompt, str) else engine.detokenize(prompt)
    if request.sampling.prompt_logprobs is None:
        return Echo(text=text)
    first_ids = engine.tokenize(prompt)[:1] if isinstance(prompt, str) else prompt[:1]
    return Echo(text=text, tokens=((engine.detokenize(first_ids), None),))


def echo_of(echo: Echo, prompt_logprobs: Sequence[TokenLogprob | None] | None) -> Echo:
    """The echo with the log probabilities that were computed."""
    if prompt_logprobs is None:
        return echo
    rest = [(item.token, item) for item in prompt_logprobs if item is not None]
    return dataclasses.replace(echo, tokens=(*echo.tokens, *rest))
