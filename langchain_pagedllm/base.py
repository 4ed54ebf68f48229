"""What both adapters share: their fields, the engine behind them, and the way from fields and call options to answers.

A call's options are understood as fields: the hooks work on a copy of the model in which the options are set, so
whatever is derived from fields (sampling, cache hints, identifying parameters, engine) honours them without more ado.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import model_validator
from typing_extensions import Self

from pagedllm.api import CacheHints, Chunk, GenerateRequest, RequestOutput, Retain, SamplingParams
from pagedllm.errors import InvalidRequestError, PagedLLMError

from .backend import BackendModel
from .cancellation import cancellable
from .deadline import Deadline, loop_time_limit, time_limit
from .errors import as_langchain_error
from .hints import read_ttl
from .output_format import to_structured_output

__all__ = ["CALL_FIELDS", "SILENT_FIELDS", "PagedModel", "hidden_salt"]

_ALIASES = {
    "model": "model_name",
    "max_completion_tokens": "max_tokens",
    "stop_sequences": "stop",
    "request_timeout": "timeout",
}
# Prompt log probabilities have no place in LangChain's results.
_SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name != "prompt_logprobs")
_HINT_FIELDS = ("cache_salt", "cache_control", "prompt_cache_key", "priority")
CALL_FIELDS = (
    *("model_name", *_SAMPLING_FIELDS, "top_logprobs", "structured_outputs"),
    *(*_HINT_FIELDS, "timeout", "stream_usage"),
)
# Fields that never change an answer.
SILENT_FIELDS = frozenset({"cache_control", "prompt_cache_key", "priority", "timeout", "stream_usage"})
# What LangChain itself passes through to the hooks, for itself or for tracing.
_LANGCHAIN_OPTIONS = frozenset(
    {"ls_structured_output_format", "run_id", "run_name", "stream", "structured_output_format"}
)


class PagedModel(BackendModel):
    """Fields and plumbing of ``PagedLLM`` and ``ChatPagedLLM``, whichever backend serves them."""

    _call_fields: ClassVar[tuple[str, ...]] = CALL_FIELDS
    """Fields that a call may set anew."""

    temperature: float | None = None
    """0 is greedy. None: the model's own recommendation."""

    max_tokens: int | None = None
    """Most tokens to generate; also ``max_completion_tokens``. None: the rest of the context."""

    min_tokens: int | None = None
    """Nothing ends the text before so many tokens."""

    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    """Makes sampling repeatable."""

    n: int | None = None
    """Completions per prompt; ``generate`` gives them all, ``invoke`` the first. A stream has one."""

    logprobs: bool | int | None = None
    """Report log probabilities: True, or how many of the most probable tokens to report at each place."""

    top_logprobs: int | None = None
    """How many of the most probable tokens to report at each place, under OpenAI's name; needs ``logprobs=True``."""

    stop: str | list[str] | None = None
    """Strings that end the text; also ``stop_sequences``. A call's ``stop`` replaces it."""

    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False

    structured_outputs: dict[str, Any] | None = None
    """What a whole answer must be, in vLLM's words: one of ``{"json": schema}``, ``{"regex": ...}``, ``{"choice":
    [...]}`` and ``{"grammar": ...}``."""

    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""

    cache_control: dict[str, Any] | None = None
    """Keep the KV of whole prompts for a while: ``{"type": "ephemeral", "ttl": "5m"}``, ``"1h"`` or seconds. In a
    chat, the same beside a text part (``{"type": "text", "text": ..., "cache_control": ...}``) keeps it up to there."""

    prompt_cache_key: str | None = None
    """Names a group of requests that share a prefix, such as a conversation."""

    priority: int | None = None
    """Lower is sooner, if the engine's ``scheduling_policy`` is ``"priority"``. None: 0."""

    streaming: bool | None = None
    """True: ``invoke`` streams inside, so that callbacks see tokens. False: never stream. None: as the caller needs."""

    stream_usage: bool = True
    """Whether the last chunk of a stream carries token counts."""

    timeout: float | None = None
    """Seconds for one answer, without loading the engine; then it is aborted and ``RequestTimeoutError`` raised."""

    @model_validator(mode="before")
    @classmethod
    def _translate_argument_names(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        translated: dict[str, Any] = {}
        for name, value in values.items():
            field = _ALIASES.get(name, name)
            if field not in cls.model_fields:
                raise ValueError(f"unknown argument {name!r}; known: {_listed(cls.model_fields)}")
            if field in translated:
                raise ValueError(f"{field} is given twice, once as {name}")
            translated[field] = os.fspath(value) if isinstance(value, os.PathLike) else value
        return translated

    @model_validator(mode="after")
    def _check_arguments(self) -> Self:
        self._sampling_params()
        self._check_timeout()
        self._cache_hints()
        to_structured_output(None, self.structured_outputs)
        return self

    @property
    def model(self) -> str:
        """The model's name or path."""
        return self.model_name

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All that may change the text, and no secret: LangChain's response cache and traces go by it."""
        params: dict[str, Any] = {"model_name": self.model_name}
        params.update({name: getattr(self, name) for name in _SAMPLING_FIELDS})
        params["stop"] = self._stop_list(None)
        params["top_logprobs"] = self.top_logprobs
        params["structured_outputs"] = self.structured_outputs
        if self.cache_salt is not None:
            # Who asks for isolation wants it of cached responses too.
            params |= hidden_salt(self.cache_salt)
        return {**params, **self._engine_params()}

    # --- From fields and call options to a request ---

    def _for_call(self, stop: str | list[str] | None, options: Mapping[str, Any]) -> Self:
        """This model as one call wants it; None among the options means not given.

        Raises:
            InvalidRequestError: An unknown option, named, or a value out of range.
        """
        for name in options:
            if name not in _LANGCHAIN_OPTIONS and _ALIASES.get(name, name) not in self._call_fields:
                raise InvalidRequestError(f"unknown option {name!r}; known: {_listed(self._call_fields)}", param=name)
        call = self._with_known_options(stop, options)
        call._check_timeout()
        return call

    def _with_known_options(self, stop: str | list[str] | None, options: Mapping[str, Any]) -> Self:
        fields = {_ALIASES.get(name, name): value for name, value in options.items()}
        update = {name: value for name, value in fields.items() if name in self._call_fields and value is not None}
        if stop is not None:
            update["stop"] = stop
        call = self.model_copy(update=update)
        # LangChain's cached description of the original.
        call.__dict__.pop("_serialized", None)
        return call

    def _stop_list(self, stop: str | list[str] | None) -> list[str] | None:
        """The stop strings in force, given a call's."""
        effective = self.stop if stop is None else stop
        return [effective] if isinstance(effective, str) else effective

    def _sampling_params(self) -> SamplingParams:
        options = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        options["stop"] = self._stop_list(None)
        options["logprobs"] = self._num_logprobs()
        return SamplingParams.from_options({name: value for name, value in options.items() if value is not None})

    def _num_logprobs(self) -> int | None:
        if self.top_logprobs is not None:
            if self.logprobs is not True:
                raise InvalidRequestError.for_value("top_logprobs", self.top_logprobs, "needs logprobs=True")
            return self.top_logprobs
        if self.logprobs is True:
            return 0
        return None if self.logprobs is False else self.logprobs

    def _cache_hints(self, retain: Sequence[Retain] = ()) -> CacheHints:
        whole = () if self.cache_control is None else (Retain(ttl_s=read_ttl(self.cache_control)),)
        return CacheHints(
            salt=self.cache_salt,
            retain=(*retain, *whole),
            priority=0 if self.priority is None else self.priority,
            prefix_key=self.prompt_cache_key,
        )

    def _request(
        self, *, retain: Sequence[Retain] = (), response_format: dict[str, Any] | None = None, **content: Any
    ) -> GenerateRequest:
        """A request of this model's sampling, hints and form of the answer, for ``prompt=`` or ``messages=``."""
        return GenerateRequest(
            **content,
            sampling=self._sampling_params(),
            hints=self._cache_hints(retain),
            structured_output=to_structured_output(response_format, self.structured_outputs),
        )

    def _check_timeout(self) -> None:
        # A call's value has not been through pydantic.
        is_number = isinstance(self.timeout, (int, float)) and not isinstance(self.timeout, bool)
        if self.timeout is not None and not (is_number and self.timeout > 0):
            raise InvalidRequestError.for_value("timeout", self.timeout, "must be more than 0 seconds")

    # --- Answers ---

    def _outputs(self, requests: Sequence[GenerateRequest]) -> list[RequestOutput]:
        """Answer all requests at once; the first error among them is raised."""
        engine = self._get_engine()
        with cancellable(engine, requests), time_limit(engine, requests, self.timeout) as deadline:
            answers = engine.generate(requests)
        return [_checked(deadline, answer) for answer in answers]

    async def _aoutputs(self, requests: Sequence[GenerateRequest]) -> list[RequestOutput]:
        engine = await self._aget_engine()
        with cancellable(engine, requests), loop_time_limit(engine, requests, self.timeout) as deadline:
            answers = await engine.agenerate(requests)
        return [_checked(deadline, answer) for answer in answers]

    def _chunks(self, request: GenerateRequest) -> Generator[Chunk, None, None]:
        """Stream an answer; the request is aborted when the generator is closed."""
        _check_one_choice(request)
        engine = self._get_engine()
        with cancellable(engine, [request]):
            stream = engine.stream(request)
            try:
                with time_limit(engine, [request], self.timeout) as deadline:
                    for chunk in stream:
                        deadline.check(chunk.finish_reason)
                        yield chunk
            finally:
                if (close := getattr(stream, "close", None)) is not None:
                    close()

    async def _achunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        _check_one_choice(request)
        engine = await self._aget_engine()
        with cancellable(engine, [request]):
            stream = engine.astream(request)
            try:
                with loop_time_limit(engine, [request], self.timeout) as deadline:
                    async for chunk in stream:
                        deadline.check(chunk.finish_reason)
                        yield chunk
            finally:
                if (aclose := getattr(stream, "aclose", None)) is not None:
                    await aclose()


def hidden_salt(salt: str) -> dict[str, str]:
    """An entry of metadata that tells salts apart; a salt itself must not reach a trace."""
    return {"cache_salt_sha256": hashlib.sha256(salt.encode()).hexdigest()}


def _listed(fields: Iterable[str]) -> str:
    return ", ".join(sorted("model" if name == "model_name" else name for name in fields))


def _check_one_choice(request: GenerateRequest) -> None:
    if request.sampling.n > 1:
        raise InvalidRequestError.for_value("n", request.sampling.n, "a stream has one choice; use generate or batch")


def _checked(deadline: Deadline, answer: RequestOutput | PagedLLMError) -> RequestOutput:
    if isinstance(answer, PagedLLMError):
        raise as_langchain_error(answer)
    deadline.check(answer.choices[0].finish_reason)
    return answer
