"""``ChatPagedLLM``: a LangChain chat model over the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import Any, ClassVar

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig
from pydantic import model_validator
from typing_extensions import Self

import langchain_pagedllm
from pagedllm.api import GenerateRequest

from .answers import PROVIDER, to_chat_chunks, to_chat_result
from .base import CALL_FIELDS, SILENT_FIELDS, hidden_salt
from .concurrency import with_max_concurrency
from .errors import langchain_errors
from .hints import end_of_tools, tools_ttl
from .messages import to_chat
from .output_format import to_structured_output, to_tool_choice, to_tools
from .tool_calls import StreamedCalls
from .tools import ToolMethods

__all__ = ["ChatPagedLLM"]

_CHAT_FIELDS = (
    *("parse_special_tokens", "continue_final_message", "add_generation_prompt"),
    *("tools", "tool_choice", "parallel_tool_calls", "response_format"),
)


class ChatPagedLLM(ToolMethods):
    """Chat model over a paged-attention engine, in this process or behind a URL.

    Instantiate:
        .. code-block:: python

            from langchain_pagedllm import ChatPagedLLM

            model = ChatPagedLLM()  # the embedded SmolLM2-135M-Instruct
            model = ChatPagedLLM(
                model="path/to/model",  # a Hugging Face folder or a GGUF file
                temperature=0,
                max_tokens=256,
                engine_args={"dtype": "float32"},
            )

        Nothing is loaded before the first call. All models of one configuration share one engine.

    Sampling:
        ``temperature, max_tokens (max_completion_tokens), min_tokens, top_p, top_k, min_p, presence_penalty,
        frequency_penalty, repetition_penalty, logit_bias, seed, stop (stop_sequences), stop_token_ids, ignore_eos, n,
        logprobs, top_logprobs``, here or per call: ``model.invoke(text, max_tokens=5)``, ``model.bind(seed=1)``. A
        call's value wins; None means not given. ``timeout``, ``stream_usage``, ``model`` and the cache hints may be
        given per call too. An option that is unknown is an error that names it.

    Cache hints:
        .. code-block:: python

            document = {"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
            model.invoke([SystemMessage([document]), HumanMessage("And?")])  # kept up to the document's end

        ``cache_control`` as a field or per call keeps whole prompts; ``cache_salt``, ``prompt_cache_key`` and
        ``priority`` likewise. Hints change when something is computed and how long it is kept, never the answer.
        ``warm_prefix(messages)``, ``match_prefix(messages)`` and ``cache_stats()``, and their async twins, look
        into the cache and fill it.

    Chat template:
        ``parse_special_tokens`` (False: control tokens written in messages are plain text), ``continue_final_message``
        (True: continue the text of the last AI message) and ``add_generation_prompt``, here or per call. A template of
        your own: ``engine_args={"chat_template": "path/to/template.jinja"}``.

    Tools and structured output:
        .. code-block:: python

            model.bind_tools([look_up], tool_choice="any").invoke("Where is Orrin?").tool_calls
            model.with_structured_output(Person).invoke("Ada Lovelace was born in 1815.")  # a Person

        A call or answer that was cut (``finish_reason="length"``) is among ``invalid_tool_calls``, or an
        ``OutputParserException``; it is never completed.

    Reasoning:
        ``<think>`` blocks of models that write them are ``additional_kwargs["reasoning_content"]``, and reasoning
        blocks in ``content_blocks``.

    Behind a URL:
        .. code-block:: python

            model = ChatPagedLLM(base_url="http://127.0.0.1:8000/v1")  # or PAGEDLLM_BASE_URL
            model = ChatPagedLLM.from_config("pagedllm.toml", profile="prod")

        Our server, or another of OpenAI's API. ``backend, api_key, connect_timeout, read_timeout, stream_idle_timeout,
        max_retries, max_connections``; see ``backend.py``. ``max_retries`` and ``api_key`` mean nothing in this
        process, where no transport can fail and no server asks.

    Invoke, stream, batch:
        .. code-block:: python

            model.invoke("Hello")
            for chunk in model.stream("Hello"):
                print(chunk.text, end="")
            await model.ainvoke("Hello")
            model.batch(["Hello", "Goodbye"])  # computed together

        Leaving a stream early, or cancelling an async call, aborts the request in the engine.

    Usage metadata:
        ``input_tokens, output_tokens, total_tokens`` and ``input_token_details``: ``cache_read``, the prompt tokens
        whose KV was found in the prefix cache, and ``cache_creation``, those whose KV was added to it; in a stream on
        its last chunk.

    Response metadata:
        ``model_name, model_provider, finish_reason ("stop", "length", "tool_calls", "abort"), stop_reason`` (the stop
        string or token id that ended the text, if one did), ``request_id``, ``timings`` (``queue_s, ttft_s, total_s``),
        ``prefix_cache`` (``cached_tokens, created_tokens`` and ``hints``, what became of each) and, if asked for,
        ``logprobs`` as OpenAI's chat API has them.

    Raises:
        pydantic.ValidationError: From the constructor, naming the argument. It is a ``ValueError``.
    """

    _call_fields: ClassVar[tuple[str, ...]] = (*CALL_FIELDS, *_CHAT_FIELDS)

    parse_special_tokens: bool = False
    """Whether control tokens written in messages (``<|im_end|>``) act as such. False: they are plain text, so that no
    user and no document can forge a turn."""

    continue_final_message: bool = False
    """Continue the exact text of the last message, an AI message, instead of answering it."""

    add_generation_prompt: bool | None = None
    """Open an assistant's turn after the messages. None: unless ``continue_final_message``."""

    tools: list[dict[str, Any]] | None = None
    """Tools that the model may ask to be called, in OpenAI's form; ``bind_tools`` makes it of others."""

    tool_choice: str | dict[str, Any] | None = None
    """``"auto"``, ``"none"``, ``"required"`` or a tool's name. None: auto."""

    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls. None: yes, unless a call is required."""

    response_format: dict[str, Any] | None = None
    """What an answer must be, in OpenAI's words: ``{"type": "json_schema", "json_schema": {"schema": ...}}`` or
    ``{"type": "json_object"}``."""

    @model_validator(mode="after")
    def _check_chat_arguments(self) -> Self:
        to_structured_output(self.response_format, self.structured_outputs)
        to_tool_choice(self.tool_choice, [tool.name for tool in to_tools(self.tools)])
        return self

    @model_validator(mode="after")
    def _set_pagedllm_chat_version(self) -> Self:
        self._add_version("langchain-pagedllm", langchain_pagedllm.__version__)
        return self

    @property
    def _llm_type(self) -> str:
        return "chat-pagedllm"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**super()._identifying_params, **{name: getattr(self, name) for name in _CHAT_FIELDS}}

    def _chat_request(self, messages: Sequence[BaseMessage]) -> GenerateRequest:
        opens_turn = self.add_generation_prompt
        chat = to_chat(messages)
        tools = to_tools(self.tools)
        ttl_s = tools_ttl(self.tools or ())
        return self._request(
            messages=chat.messages,
            retain=chat.retain if ttl_s is None else (end_of_tools(chat.messages, ttl_s), *chat.retain),
            tools=tools,
            tool_choice=to_tool_choice(self.tool_choice, [tool.name for tool in tools]),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self.response_format,
            parse_special_tokens=self.parse_special_tokens,
            continue_final_message=self.continue_final_message,
            add_generation_prompt=not self.continue_final_message if opens_turn is None else opens_turn,
        )

    def _prefix_request(self, prefix: LanguageModelInput) -> GenerateRequest:
        closed = self.model_copy(update={"add_generation_prompt": self.add_generation_prompt or False})
        return closed._chat_request(self._convert_input(prefix).to_messages())

    # --- The four hooks ---

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002 - LangChain's signature
        **kwargs: Any,
    ) -> ChatResult:
        with langchain_errors():
            call = self._for_call(stop, kwargs)
            [output] = call._outputs([call._chat_request(messages)])
            return to_chat_result(output, model_name=call._served_name)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002 - LangChain's signature
        **kwargs: Any,
    ) -> ChatResult:
        with langchain_errors():
            call = self._for_call(stop, kwargs)
            [output] = await call._aoutputs([call._chat_request(messages)])
            return to_chat_result(output, model_name=call._served_name)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with langchain_errors():
            call = self._for_call(stop, kwargs)
            calls = StreamedCalls()
            with closing(call._chunks(call._chat_request(messages))) as chunks:
                for chunk in chunks:
                    for piece in to_chat_chunks(
                        chunk, calls, model_name=call._served_name, stream_usage=call.stream_usage
                    ):
                        # LangChain's stream() gives no run manager and calls back itself.
                        if run_manager:
                            run_manager.on_llm_new_token(piece.text, chunk=piece)
                        yield piece

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with langchain_errors():
            call = self._for_call(stop, kwargs)
            calls = StreamedCalls()
            async with aclosing(call._achunks(call._chat_request(messages))) as chunks:
                async for chunk in chunks:
                    for piece in to_chat_chunks(
                        chunk, calls, model_name=call._served_name, stream_usage=call.stream_usage
                    ):
                        if run_manager:
                            await run_manager.on_llm_new_token(piece.text, chunk=piece)
                        yield piece

    # --- Batches: a thread per input, so that all reach the engine at once; LangChain's default is 6 on two cores. ---

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answer all inputs together; ``max_concurrency`` in the config limits how many at a time."""
        configs = with_max_concurrency(config, len(inputs), self._max_concurrency())
        return super().batch(inputs, configs, return_exceptions=return_exceptions, **kwargs)

    def batch_as_completed(  # type: ignore[override]
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> Iterator[tuple[int, AIMessage | Exception]]:
        """As ``batch``, yielding each answer with its input's position as soon as it is there."""
        configs = with_max_concurrency(config, len(inputs), self._max_concurrency())
        return super().batch_as_completed(  # type: ignore[call-overload]
            inputs, configs, return_exceptions=return_exceptions, **kwargs
        )

    # --- Token counts, profile, tracing ---

    def get_token_ids(self, text: str) -> list[int]:
        """The text's token ids, without special tokens; loads the engine for its tokenizer."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        with langchain_errors():
            return self._get_engine().tokenize(text, add_special_tokens=False)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Prompt tokens of this chat and its tools, rendered by the model's chat template; loads the engine."""
        with langchain_errors():
            if not messages:
                return 0
            call = self if tools is None else self.model_copy(update={"tools": list(tools)})
            return self._get_engine().count_tokens(call._chat_request(messages))

    def _resolve_model_profile(self) -> ModelProfile | None:
        max_model_len = self._max_model_len()
        if max_model_len is None:
            return None
        return {
            "max_input_tokens": max_model_len,
            "max_output_tokens": max_model_len,
            "text_inputs": True,
            "text_outputs": True,
            "image_inputs": False,
            "audio_inputs": False,
            "video_inputs": False,
            "tool_calling": True,
            "tool_choice": True,
            "tool_call_streaming": True,
            "structured_output": True,
            "reasoning_output": False,
            "temperature": True,
        }

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        # LangChain would put the call's None over the constructor's stop: in the trace and in the cache key.
        return super()._get_invocation_params(stop=self._stop_list(stop), **_with_hidden_salt(kwargs))

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        # The key of the response cache: calls that differ only in when they are computed have the same answer.
        told = {name: value for name, value in kwargs.items() if name not in SILENT_FIELDS}
        return super()._get_llm_string(stop, **_with_hidden_salt(told))

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=self._stop_list(stop), **kwargs)
        params["ls_provider"] = PROVIDER
        return params


def _with_hidden_salt(options: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in options.items() if name != "cache_salt"}
    salt = options.get("cache_salt")
    return rest if salt is None else rest | hidden_salt(str(salt))
