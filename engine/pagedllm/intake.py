"""Requests into sequences: encoded, checked against the model's limits, and with its defaults filled in."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections.abc import Sequence as List
from typing import TypeVar

from .api import GenerateRequest, Message, ModelInfo, Retain, SamplingParams
from .control.sequence import Breakpoint, Sequence
from .errors import ContextLengthError, InvalidRequestError
from .files.description import GenerationDefaults
from .text.answer import AnswerForms
from .text.tokenizer import Tokenizer

__all__ = ["Intake", "as_warming"]

_Value = TypeVar("_Value")


def as_warming(request: GenerateRequest) -> GenerateRequest:
    """The request with its prompt computed and cached, and nothing generated."""
    return dataclasses.replace(request, hints=dataclasses.replace(request.hints, warm=True))


class Intake:
    """Makes sequences of requests. Safe from many threads at once.

    Args:
        tokenizer: The model's.
        info: The model's limits, as the engine's cache leaves them.
        defaults: What the model's authors recommend for sampling.
        answer_forms: Finds what answers must be.
    """

    def __init__(
        self, tokenizer: Tokenizer, info: ModelInfo, defaults: GenerationDefaults, answer_forms: AnswerForms
    ) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._defaults = defaults
        self._answer_forms = answer_forms

    def make_sequences(self, request: GenerateRequest, prompt_ids: List[int] | None = None) -> list[Sequence]:
        """One sequence for each choice. May wait for a grammar to be compiled: see ``may_wait``.

        Args:
            prompt_ids: What ``encode_prompt`` gives for the request, if that is known.
        """
        token_ids = self.encode_prompt(request) if prompt_ids is None else list(prompt_ids)
        sampling = request.sampling
        if request.hints.warm:
            # Room for one token, as for any other request, so that what warms can also be asked.
            sampling = dataclasses.replace(sampling, max_tokens=1, min_tokens=0, n=1)
        params = self._fill_in(sampling, len(token_ids))
        assert params.max_tokens is not None
        seed = secrets.randbits(64) if params.seed is None else params.seed
        form = None if request.hints.warm else self._answer_forms.find(request, token_ids, seed)
        breakpoints = tuple(self._breakpoint(request, place, token_ids) for place in request.hints.retain)
        sequences: list[Sequence] = []
        for index in range(params.n):
            sequences.append(
                Sequence(
                    request_id=request.request_id,
                    token_ids=list(token_ids),
                    num_prompt_tokens=len(token_ids),
                    max_tokens=params.max_tokens,
                    sampling=params,
                    seed=seed,
                    eos_token_ids=self._tokenizer.eos_token_ids,
                    hints=request.hints,
                    breakpoints=breakpoints if index == 0 else (),
                    index=index,
                    leader=sequences[0] if sequences else None,
                    answer_form=form,
                )
            )
        return sequences

    @staticmethod
    def may_wait(request: GenerateRequest) -> bool:
        """Whether ``make_sequences`` may take seconds, because a grammar has to be compiled."""
        return request.structured_output is not None or request.calls_tools

    def encode_prompt(self, request: GenerateRequest) -> list[int]:
        if request.messages is not None:
            return self._tokenizer.encode_chat(
                request.messages,
                tools=request.tools,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                parse_special_tokens=bool(request.parse_special_tokens),
            )
        assert request.prompt is not None
        if not isinstance(request.prompt, str):
            self._check_token_ids("prompt", request.prompt)
            return list(request.prompt)
        parse_special_tokens = request.parse_special_tokens is not False
        token_ids = self._tokenizer.encode(request.prompt, parse_special_tokens=parse_special_tokens)
        if not token_ids:
            raise InvalidRequestError.for_value("prompt", request.prompt, "has no tokens to go on from")
        return token_ids

    def _breakpoint(self, request: GenerateRequest, place: Retain, token_ids: list[int]) -> Breakpoint:
        if place.message_index is None:
            return Breakpoint(place.num_tokens or len(token_ids), place.ttl_s)
        if request.messages is None:
            raise InvalidRequestError("retain: message_index is for messages; a prompt has tokens", param="retain")
        if place.message_index >= len(request.messages):
            allowed = f"the chat has {len(request.messages)} messages, counted from 0"
            raise InvalidRequestError.for_value("retain.message_index", place.message_index, allowed)
        # The tokens that stay the same whatever stands behind the place: those that this chat has in common with one
        # that goes on differently there.
        messages = list(request.messages)
        messages[place.message_index] = _cut(messages[place.message_index], place.num_chars)
        other_ids = self.encode_prompt(dataclasses.replace(request, messages=tuple(messages)))
        pairs = zip(token_ids, other_ids, strict=False)
        num_common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return Breakpoint(num_common, place.ttl_s)

    def _fill_in(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """The parameters with defaults of the model, after checking them against its limits."""
        limit = self._info.max_model_len
        if num_prompt_tokens >= limit:
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens, but max_model_len is {limit}, at least one of them for "
                "the completion",
                param="prompt",
            )
        max_tokens = limit - num_prompt_tokens if params.max_tokens is None else params.max_tokens
        if num_prompt_tokens + max_tokens > limit:
            raise ContextLengthError(
                f"{num_prompt_tokens} prompt tokens and max_tokens={max_tokens} make "
                f"{num_prompt_tokens + max_tokens}, but max_model_len is {limit}",
                param="max_tokens",
            )
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        self._check_token_ids("logit_bias", tuple(dict(params.logit_bias)))
        if params.min_tokens > max_tokens:
            allowed = f"must not exceed the {max_tokens} tokens that the context leaves for the completion"
            raise InvalidRequestError.for_value("min_tokens", params.min_tokens, allowed)
        defaults = self._defaults
        return dataclasses.replace(
            params,
            max_tokens=max_tokens,
            temperature=_first(params.temperature, defaults.temperature, 1.0),
            top_p=_first(params.top_p, defaults.top_p, 1.0),
            top_k=_first(params.top_k, defaults.top_k, 0),
        )

    def _check_token_ids(self, param: str, token_ids: tuple[int, ...]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._info.vocab_size:
                allowed = f"a token id must be in 0..{self._info.vocab_size - 1}"
                raise InvalidRequestError.for_value(param, token_id, allowed)


def _cut(message: Message, num_chars: int | None) -> Message:
    """The message up to a place in its text, and then something that nobody writes."""
    content = message.content[:num_chars] + "\U000f0003"
    return Message(role=message.role, content=content, tool_calls=message.tool_calls, tool_call_id=message.tool_call_id)


def _first(value: _Value | None, default: _Value | None, fallback: _Value) -> _Value:
    if value is not None:
        return value
    return fallback if default is None else default
