"""What the fake engine says: endless words, a pure function of the prompt and the parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from pagedllm.api import FinishReason, SamplingParams, TokenLogprob

__all__ = ["EOS", "scripted_answer", "scripted_logprob"]

# Every character is a token, so that no token is part of one.
EOS = 0x110000
_WORDS = ("paged", "cache", "block", "prefix", "token", "queue", "größe", "你好", "😀", "step", "worker", "stream")


def scripted_answer(
    params: SamplingParams,
    prompt_ids: tuple[int, ...],
    max_model_len: int,
    index: int = 0,
    script: str | None = None,
) -> tuple[str, tuple[int, ...], FinishReason, str | int | None]:
    """Text, tokens through the one that ended it, and why it ended; greedy choices are all the same.

    Args:
        script: What to say; None: words without end.
    """
    greedy = params.temperature is not None and params.temperature < 1e-5
    options = (params.temperature, params.top_p, params.top_k, params.seed, *([index] if index else []))
    source = repr((prompt_ids, None if greedy else options))
    room = max_model_len - len(prompt_ids)
    max_tokens = room if params.max_tokens is None else params.max_tokens
    num_natural = max_tokens if params.ignore_eos else 40 + hashlib.sha256(source.encode()).digest()[0] % 40
    if script is not None:
        num_natural = len(script)
    text = ""
    for char in _endless_words(source) if script is None else script:
        if len(text) == min(num_natural, max_tokens):
            break
        text += char
        if ord(char) in params.stop_token_ids:
            return text[:-1], tuple(map(ord, text)), "stop", ord(char)
        for stop in params.stop:
            if text.endswith(stop):
                return text[: -len(stop)], tuple(map(ord, text)), "stop", stop
    if len(text) == max_tokens and len(text) != len(script or ""):
        return text, tuple(map(ord, text)), "length", None
    if len(text) == max_tokens:
        return text, tuple(map(ord, text)), "stop", None  # whole with its last token, as a grammar has it
    return text, (*map(ord, text), EOS), "stop", None


def scripted_logprob(token_id: int, num_top: int) -> TokenLogprob:
    """A log probability for a token, and as many most probable ones, of which it is the first."""
    top = tuple(TokenLogprob(rival, _text_of(rival), -0.25 - i) for i, rival in enumerate([token_id, *range(65, 90)]))
    return TokenLogprob(token_id, _text_of(token_id), -0.25, top[:num_top])


def _text_of(token_id: int) -> str:
    return "" if token_id == EOS else chr(token_id)


def _endless_words(source: str) -> Iterator[str]:
    state = source.encode()
    while True:
        state = hashlib.sha256(state).digest()
        yield from _WORDS[state[0] % len(_WORDS)] + " "
