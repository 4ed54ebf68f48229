"""What both adapters share: their fields, the engine behind them, and the way from fields and call options to answers.

A call's options are understood as fields: the hooks work on a copy of the model in which the options are set, so
whatever is derived from fields (sampling, cache hints, identifying parameters, engine) honours them without more ado.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import os
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from langchain_core.utils import secret_from_env
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator
from typing_extensions import Self

from pagedllm.api import CacheHints, Chunk, Engine, GenerateRequest, RequestOutput, SamplingParams
from pagedllm.config import DEFAULT_MODEL, EngineConfig
from pagedllm.errors import ConfigError, InvalidRequestError, PagedLLMError

from .deadline import Deadline, loop_time_limit, time_limit
from .errors import as_langchain_error

__all__ = ["CALL_FIELDS", "PagedModel"]

_ALIASES = {
    "model": "model_name",
    "max_completion_tokens": "max_tokens",
    "stop_sequences": "stop",
    "request_timeout": "timeout",
}
_NOT_YET = {
    "base_url": "base_url is not supported yet: the engine runs in this process",
}
# Prompt log probabilities have no place in LangChain's results.
_SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name != "prompt_logprobs")
CALL_FIELDS = ("model_name", *_SAMPLING_FIELDS, "top_logprobs", "cache_salt", "timeout", "stream_usage")
# What LangChain itself passes through to the hooks, for itself or for tracing.
_LANGCHAIN_OPTIONS = frozenset(
    {"ls_structured_output_format", "run_id", "run_name", "stream", "structured_output_format"}
)


class PagedModel(BaseModel):
    """Fields and plumbing of ``PagedLLM`` and ``ChatPagedLLM``.

    Constructing one loads nothing. The engine is looked up per call in a process-wide registry by its configuration,
    so copies, pickles and reconfigured models find the same one, and no handle lives on the object.
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True,
        populate_by_name=True,
        # Fields named model_* are LangChain's convention.
        protected_namespaces=(),
        # A validation error must not print an api_key that stood beside the wrong value.
        hide_input_in_errors=True,
    )

    _call_fields: ClassVar[tuple[str, ...]] = CALL_FIELDS
    """Fields that a call may set anew."""

    model_name: str = Field(default_factory=lambda: os.environ.get("PAGEDLLM_MODEL") or DEFAULT_MODEL, alias="model")
    """Model name or path. Default: ``PAGEDLLM_MODEL``, else the embedded model."""

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

    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""

    streaming: bool | None = None
    """True: ``invoke`` streams inside, so that callbacks see tokens. False: never stream. None: as the caller needs."""

    stream_usage: bool = True
    """Whether the last chunk of a stream carries token counts."""

    timeout: float | None = None
    """Seconds for one answer, without loading the engine; then it is aborted and ``RequestTimeoutError`` raised."""

    max_retries: int | None = None
    """Accepted for LangChain's sake; means nothing in this process, where no transport can fail."""

    api_key: SecretStr | None = Field(default_factory=secret_from_env("PAGEDLLM_API_KEY", default=None))
    """Accepted for LangChain's sake; means nothing in this process, where no server asks for it."""

    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Options of ``pagedllm.config.EngineConfig`` other than the model, such as ``{"dtype": "float32"}``."""

    engine: Engine | None = Field(default=None, exclude=True, repr=False)
    """An engine of your own, used instead of a shared one and never closed here. Pickling leaves it behind."""

    @model_validator(mode="before")
    @classmethod
    def _translate_argument_names(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        translated: dict[str, Any] = {}
        for name, value in values.items():
            if name in _NOT_YET:
                raise ValueError(_NOT_YET[name])
            field = _ALIASES.get(name, name)
            if field not in cls.model_fields:
                raise ValueError(f"unknown argument {name!r}; known: {_listed(cls.model_fields)}")
            if field in translated:
                raise ValueError(f"{field} is given twice, once as {name}")
            translated[field] = os.fspath(value) if isinstance(value, os.PathLike) else value
        return translated

    @model_validator(mode="after")
    def _check_arguments(self) -> Self:
        if self.engine is not None:
            if self.engine_args:
                raise ConfigError("engine_args have no effect on an engine that exists: give either")
            if "model_name" not in self.model_fields_set:
                self.model_name = self.engine.model_info().model
        else:
            self._engine_config()
        self._check_engine_model()
        self._sampling_params()
        self._check_timeout()
        CacheHints(salt=self.cache_salt)
        return self

    @property
    def model(self) -> str:
        """The model's name or path."""
        return self.model_name

    @property
    def lc_secrets(self) -> dict[str, str]:
        """The constructor argument that is secret, and the variable that it comes from."""
        return {"api_key": "PAGEDLLM_API_KEY"}

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All that may change the text, and no secret: LangChain's response cache and traces go by it."""
        params: dict[str, Any] = {"model_name": self.model_name}
        params.update({name: getattr(self, name) for name in _SAMPLING_FIELDS})
        params["stop"] = self._stop_list(None)
        params["top_logprobs"] = self.top_logprobs
        if self.cache_salt is not None:
            # Who asks for isolation wants it of cached responses too; the salt itself must not reach a trace.
            params["cache_salt_sha256"] = hashlib.sha256(self.cache_salt.encode()).hexdigest()
        if self.engine is None:
            params["engine_args"] = dataclasses.asdict(self._engine_config())
            del params["engine_args"]["model"]
        else:
            info = self.engine.model_info()
            params["engine_args"] = {"dtype": info.dtype, "max_model_len": info.max_model_len}
        return params

    def __getstate__(self) -> dict[Any, Any]:
        state = super().__getstate__()
        return {**state, "__dict__": {**state["__dict__"], "engine": None}}

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        if self.engine is not None:
            # A copy of a model shares its engine; an engine itself cannot be copied.
            memo[id(self.engine)] = self.engine
        return super().__deepcopy__(memo)

    # --- From fields and call options to a request ---

    def _for_call(self, stop: str | list[str] | None, options: Mapping[str, Any]) -> Self:
        """This model as one call wants it; None among the options means not given.

        Raises:
            InvalidRequestError: An unknown option, named, or a value out of range.
        """
        for name in options:
            if name in _NOT_YET:
                raise InvalidRequestError(_NOT_YET[name], param=name)
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

    def _request(self, **content: Any) -> GenerateRequest:
        """A request of this model's sampling and hints, for ``prompt=`` or ``messages=``."""
        return GenerateRequest(**content, sampling=self._sampling_params(), hints=CacheHints(salt=self.cache_salt))

    def _check_timeout(self) -> None:
        # A call's value has not been through pydantic.
        is_number = isinstance(self.timeout, (int, float)) and not isinstance(self.timeout, bool)
        if self.timeout is not None and not (is_number and self.timeout > 0):
            raise InvalidRequestError.for_value("timeout", self.timeout, "must be more than 0 seconds")

    # --- The engine ---

    def _engine_config(self) -> EngineConfig:
        if "model" in self.engine_args:
            raise ConfigError("engine_args: give the model as model=")
        return EngineConfig.from_options({"model": self.model_name, **self.engine_args})

    def _check_engine_model(self) -> None:
        if self.engine is not None and self.model_name != (served := self.engine.model_info().model):
            raise InvalidRequestError.for_value("model", self.model_name, f"the given engine serves {served!r}")

    def _get_engine(self) -> Engine:
        """The engine, loaded if it is not yet."""
        if self.engine is not None:
            self._check_engine_model()
            return self.engine
        # Lazy door: the local engine brings torch.
        from pagedllm.registry import shared_engine  # noqa: PLC0415

        return shared_engine(self._engine_config())

    async def _aget_engine(self) -> Engine:
        # Loading takes seconds, which the event loop must not wait for.
        return self._get_engine() if self.engine is not None else await asyncio.to_thread(self._get_engine)

    def _max_concurrency(self) -> int:
        """Most requests that are worth a thread each."""
        return EngineConfig().max_num_seqs if self.engine is not None else self._engine_config().max_num_seqs

    def _max_model_len(self) -> int | None:
        """The longest sequence in tokens, without loading the model; None if the model cannot be found."""
        if self.engine is not None:
            return self.engine.model_info().max_model_len
        limit = self._engine_config().max_model_len
        try:
            described = _described_max_model_len(self.model_name)
        except PagedLLMError:
            return limit
        return described if limit is None else min(limit, described)

    # --- Answers ---

    def _outputs(self, requests: Sequence[GenerateRequest]) -> list[RequestOutput]:
        """Answer all requests at once; the first error among them is raised."""
        engine = self._get_engine()
        with time_limit(engine, requests, self.timeout) as deadline:
            answers = engine.generate(requests)
        return [_checked(deadline, answer) for answer in answers]

    async def _aoutputs(self, requests: Sequence[GenerateRequest]) -> list[RequestOutput]:
        engine = await self._aget_engine()
        with loop_time_limit(engine, requests, self.timeout) as deadline:
            answers = await engine.agenerate(requests)
        return [_checked(deadline, answer) for answer in answers]

    def _chunks(self, request: GenerateRequest) -> Generator[Chunk, None, None]:
        """Stream an answer; the request is aborted when the generator is closed."""
        _check_one_choice(request)
        engine = self._get_engine()
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
        stream = engine.astream(request)
        try:
            with loop_time_limit(engine, [request], self.timeout) as deadline:
                async for chunk in stream:
                    deadline.check(chunk.finish_reason)
                    yield chunk
        finally:
            if (aclose := getattr(stream, "aclose", None)) is not None:
                await aclose()


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


def _described_max_model_len(model: str) -> int:
    # Lazy door: only profiles look at files.
    from pagedllm.files.locate import locate_model  # noqa: PLC0415

    # A profile is asked for in passing: it must not start a download.
    files = locate_model(model, local_only=True)
    metadata = files.path / "config.json" if files.kind == "folder" else files.path
    return _read_max_model_len(files, metadata.stat().st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _read_max_model_len(files: Any, modified_ns: int) -> int:
    """Read once per state of the file: a GGUF file takes 0.1 s, and LangChain builds models anew for every call."""
    del modified_ns
    from pagedllm.files.description import describe_model  # noqa: PLC0415

    return describe_model(files).max_model_len
