"""``PagedLLM``: a LangChain completion model over the engine."""

from __future__ import annotations

import functools
import operator
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun, Callbacks
from langchain_core.language_models import BaseLLM, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import BaseMessage, get_buffer_string
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.tracers._streaming import _StreamingCallbackHandler
from pydantic import model_validator
from typing_extensions import Self

import langchain_pagedllm
from pagedllm.api import Chunk, GenerateRequest, RequestOutput
from pagedllm.errors import InvalidRequestError

from .answers import PROVIDER, to_logprobs, to_response_metadata, to_usage_metadata
from .concurrency import with_max_concurrency
from .errors import langchain_errors
from .prefix import PrefixMethods

__all__ = ["PagedLLM"]


class PagedLLM(PrefixMethods, BaseLLM):
    """Completion model over a paged-attention engine, here or behind a URL: the prompt is continued as it is.

    Fields, call options and errors are those of ``ChatPagedLLM``.

    .. code-block:: python

        from langchain_pagedllm import PagedLLM

        llm = PagedLLM(temperature=0, max_tokens=32)  # the embedded SmolLM2-135M-Instruct
        llm.invoke("Once upon a time")
        for text in llm.stream("Once upon a time"):
            print(text, end="")
        llm.batch(["One, two,", "A, B,"])  # one call of the engine

    ``generate`` tells more, and gives all ``n`` completions: each generation's ``generation_info`` has ``model_name,
    model_provider, finish_reason, stop_reason, request_id, timings``, ``logprobs`` if asked for, and a prompt's first
    one ``usage_metadata``; ``llm_output["token_usage"]`` has the sums.
    """

    @model_validator(mode="after")
    def _set_pagedllm_version(self) -> Self:
        self._add_version("langchain-pagedllm", langchain_pagedllm.__version__)
        return self

    @property
    def _llm_type(self) -> str:
        return "pagedllm"

    def _prefix_request(self, prefix: LanguageModelInput) -> GenerateRequest:
        return self._request(prompt=self._convert_input(prefix).to_string())

    # --- The four hooks ---

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        if self._streams_inside(prompts, run_manager, kwargs):
            chunks = list(self._stream(prompts[0], stop, run_manager, **{**kwargs, "stream_usage": True}))
            return _to_result([[_merged(chunks)]])
        with langchain_errors():
            call = self._for_call(stop, kwargs)
            outputs = call._outputs([call._request(prompt=prompt) for prompt in prompts])
            return _to_result([_to_generations(output, call._served_name) for output in outputs])

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        if self._streams_inside(prompts, run_manager, kwargs):
            stream = self._astream(prompts[0], stop, run_manager, **{**kwargs, "stream_usage": True})
            return _to_result([[_merged([chunk async for chunk in stream])]])
        with langchain_errors():
            call = self._for_call(stop, kwargs)
            outputs = await call._aoutputs([call._request(prompt=prompt) for prompt in prompts])
            return _to_result([_to_generations(output, call._served_name) for output in outputs])

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        with langchain_errors():
            call = self._for_call(stop, kwargs)
            with closing(call._chunks(call._request(prompt=prompt))) as chunks:
                for chunk in chunks:
                    for piece in _to_generation_chunks(chunk, call._served_name, call.stream_usage):
                        if run_manager:
                            run_manager.on_llm_new_token(piece.text, chunk=piece)
                        yield piece

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        with langchain_errors():
            call = self._for_call(stop, kwargs)
            async with aclosing(call._achunks(call._request(prompt=prompt))) as chunks:
                async for chunk in chunks:
                    for piece in _to_generation_chunks(chunk, call._served_name, call.stream_usage):
                        if run_manager:
                            await run_manager.on_llm_new_token(piece.text, chunk=piece)
                        yield piece

    def _streams_inside(self, prompts: list[str], run_manager: Any, options: Mapping[str, Any]) -> bool:
        """Whether an invoke must stream so that its callbacks see tokens, by the rules of LangChain's chat models."""
        # LangChain gives a batch only its first input's run manager: the others' tokens would be told of the wrong run.
        if len(prompts) != 1 or (options.get("n") or self.n or 1) > 1:
            return False
        if options.get("stream") is not None:
            return bool(options["stream"])
        if self.streaming is not None:
            return self.streaming
        return any(isinstance(handler, _StreamingCallbackHandler) for handler in getattr(run_manager, "handlers", ()))

    # --- Response cache: LangChain makes the key of the identifying parameters alone, so a call's options become
    # --- fields of the copy that is asked. ---

    def generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """As LangChain's, except that calls with different options never share a cached response."""
        call = self._with_known_options(stop, kwargs)
        return super(PagedLLM, call).generate(prompts, call._stop_list(None), callbacks, **kwargs)

    async def agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """As LangChain's, except that calls with different options never share a cached response."""
        call = self._with_known_options(stop, kwargs)
        return await super(PagedLLM, call).agenerate(prompts, call._stop_list(None), callbacks, **kwargs)

    # --- Batches ---

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """Answer all inputs in one call of the engine.

        With ``return_exceptions``, or a ``max_concurrency`` below the number of inputs, each input is a call of its
        own: so an error is its own too, and the next input starts when any ends.
        """
        if return_exceptions or _is_limited(config, len(inputs)):
            configs = with_max_concurrency(config, len(inputs), self._max_concurrency())
            return Runnable.batch(self, inputs, configs, return_exceptions=return_exceptions, **kwargs)
        return super().batch(inputs, config, **kwargs)

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """As ``batch``."""
        if return_exceptions or _is_limited(config, len(inputs)):
            return await Runnable.abatch(self, inputs, config, return_exceptions=return_exceptions, **kwargs)
        return await super().abatch(inputs, config, **kwargs)

    def batch_as_completed(  # type: ignore[override]
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> Iterator[tuple[int, str | Exception]]:
        """As ``batch``, yielding each answer with its input's position as soon as it is there."""
        configs = with_max_concurrency(config, len(inputs), self._max_concurrency())
        return super().batch_as_completed(  # type: ignore[call-overload]
            inputs, configs, return_exceptions=return_exceptions, **kwargs
        )

    # --- Token counts, tracing ---

    def get_token_ids(self, text: str) -> list[int]:
        """The text's token ids, without special tokens; loads the engine for its tokenizer."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        with langchain_errors():
            return self._get_engine().tokenize(text, add_special_tokens=False)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Prompt tokens of the text that LangChain makes of these messages for a completion model; loads the engine.

        Raises:
            InvalidRequestError: ``tools`` are given: a completion model has no place for them.
        """
        with langchain_errors():
            if tools:
                raise InvalidRequestError("a completion model takes no tools", param="tools")
            if not messages:
                return 0
            return self._get_engine().count_tokens(self._request(prompt=get_buffer_string(messages)))

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=self._stop_list(stop), **kwargs)
        params["ls_provider"] = PROVIDER
        return params


def _is_limited(config: RunnableConfig | Sequence[RunnableConfig] | None, num_inputs: int) -> bool:
    first = config[0] if isinstance(config, Sequence) and config else config
    limit = first.get("max_concurrency") if isinstance(first, Mapping) else None
    return limit is not None and limit < num_inputs


def _to_generations(output: RequestOutput, model_name: str) -> list[Generation]:
    """One generation for each choice; the request's usage is on the first."""
    generations = []
    for choice in output.choices:
        info = to_response_metadata(choice, output, model_name=model_name)
        info |= to_logprobs(choice.logprobs)
        if choice.index == 0:
            info["usage_metadata"] = to_usage_metadata(output.usage)
        generations.append(Generation(text=choice.text, generation_info=info))
    return generations


def _to_generation_chunks(chunk: Chunk, model_name: str, stream_usage: bool) -> Iterator[GenerationChunk]:
    """A chunk of text if there is any; then, once, the end with what LangChain would otherwise add up."""
    logprobs = to_logprobs(chunk.logprobs)
    if chunk.text or logprobs:
        yield GenerationChunk(text=chunk.text, generation_info=logprobs or None)
    if chunk.finish_reason is None:
        return
    info = to_response_metadata(chunk, chunk, model_name=model_name)
    if stream_usage and chunk.usage is not None:
        info["usage_metadata"] = to_usage_metadata(chunk.usage)
    yield GenerationChunk(text="", generation_info=info)


def _merged(chunks: list[GenerationChunk]) -> Generation:
    whole = functools.reduce(operator.add, chunks)
    return Generation(text=whole.text, generation_info=whole.generation_info)


def _to_result(generations: list[list[Generation]]) -> LLMResult:
    infos = [choices[0].generation_info or {} for choices in generations]
    usages = [info["usage_metadata"] for info in infos]
    token_usage = {
        "prompt_tokens": sum(usage["input_tokens"] for usage in usages),
        "completion_tokens": sum(usage["output_tokens"] for usage in usages),
        "total_tokens": sum(usage["total_tokens"] for usage in usages),
        "cached_tokens": sum(usage["input_token_details"]["cache_read"] for usage in usages),
    }
    llm_output: dict[str, Any] = {"token_usage": token_usage}
    if infos:
        llm_output["model_name"] = infos[0]["model_name"]
    return LLMResult(generations=[*generations], llm_output=llm_output)
