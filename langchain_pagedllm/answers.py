"""The engine's answers to LangChain's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from pagedllm.api import Choice, Chunk, RequestOutput, TokenLogprob, Usage

from .hints import to_prefix_cache
from .tool_calls import StreamedCalls, to_tool_calls

__all__ = [
    "PROVIDER",
    "to_chat_chunks",
    "to_chat_result",
    "to_logprobs",
    "to_response_metadata",
    "to_usage_metadata",
]

# LangChain compares a message's model_provider with the model's ls_provider, so both come from here.
PROVIDER = "pagedllm"


def to_usage_metadata(usage: Usage) -> UsageMetadata:
    """Token counts in LangChain's words; ``cache_read`` is what the prefix cache served, ``cache_creation`` what it
    got, ``reasoning`` what of the answer was thoughts, if any was."""
    thoughts: Any = {"output_token_details": {"reasoning": usage.reasoning_tokens}} if usage.reasoning_tokens else {}
    # mypy as Python 3.10 does not know the NotRequired that langchain-core takes from typing.
    return UsageMetadata(  # type: ignore[typeddict-item]
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_token_details={"cache_read": usage.cached_tokens, "cache_creation": usage.cache_creation_tokens},
        **thoughts,
    )


def to_logprobs(logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any]:
    """Log probabilities as OpenAI's chat API has them, as an entry of metadata; nothing if there are none."""
    if not logprobs:
        return {}
    content = [_to_logprob(item) | {"top_logprobs": [_to_logprob(top) for top in item.top]} for item in logprobs]
    return {"logprobs": {"content": content}}


def to_response_metadata(end: Chunk | Choice, answer: Chunk | RequestOutput, *, model_name: str) -> dict[str, Any]:
    """What is told about an answer once, at its end: who gave it, why it ended, where the time went.

    Args:
        end: Of one choice.
        answer: That of the whole request; of a stream, its last chunk.
    """
    metadata: dict[str, Any] = {
        "model_name": model_name,
        "model_provider": PROVIDER,
        "finish_reason": end.finish_reason,
        "request_id": answer.request_id,
    }
    if end.stop_reason is not None:
        metadata["stop_reason"] = end.stop_reason
    if answer.timings is not None:
        metadata["timings"] = dataclasses.asdict(answer.timings)
    if answer.usage is not None:
        metadata["prefix_cache"] = to_prefix_cache(answer.usage, answer.hints)
    return metadata


def to_chat_result(output: RequestOutput, *, model_name: str) -> ChatResult:
    """Convert a whole answer, one generation for each choice."""
    generations = []
    for choice in output.choices:
        metadata = to_response_metadata(choice, output, model_name=model_name)
        metadata |= to_logprobs(choice.logprobs)
        # LangChain adds up the usage of all generations, so the request's is on the first alone.
        usage = to_usage_metadata(output.usage) if choice.index == 0 else None
        calls, invalid = to_tool_calls(choice)
        message = AIMessage(
            content=choice.text,
            tool_calls=calls,
            invalid_tool_calls=invalid,
            additional_kwargs={"reasoning_content": choice.reasoning} if choice.reasoning else {},
            response_metadata=metadata,
            usage_metadata=usage,
        )
        generations.append(ChatGeneration(message=message, generation_info=dict(metadata)))
    return ChatResult(generations=generations)


def to_chat_chunks(
    chunk: Chunk, calls: StreamedCalls, *, model_name: str, stream_usage: bool
) -> Iterator[ChatGenerationChunk]:
    """Convert a piece of a streamed answer: reasoning, text and calls in chunks of their own, then the end.

    LangChain adds chunks up, scalars included, so everything but text, log probabilities and the provider's name comes
    once, with the end. Its event stream loses what shares a chunk with ``chunk_position``, and mixes up text and calls
    that share one.

    Args:
        calls: Those of this answer so far.
    """
    logprobs = to_logprobs(chunk.logprobs)
    provider = {"model_provider": PROVIDER}
    if chunk.reasoning:
        thought = {"reasoning_content": chunk.reasoning}
        yield ChatGenerationChunk(
            message=AIMessageChunk(content="", additional_kwargs=thought, response_metadata=provider)
        )
    if chunk.text or logprobs:
        message = AIMessageChunk(content=chunk.text, response_metadata={**provider, **logprobs})
        yield ChatGenerationChunk(message=message, generation_info=logprobs or None)
    for call in calls.convert(chunk):
        yield ChatGenerationChunk(
            message=AIMessageChunk(content="", tool_call_chunks=[call], response_metadata=provider)
        )
    if chunk.finish_reason is None:
        return
    metadata = to_response_metadata(chunk, chunk, model_name=model_name)
    usage = to_usage_metadata(chunk.usage) if stream_usage and chunk.usage is not None else None
    end = AIMessageChunk(content="", response_metadata=metadata, usage_metadata=usage, chunk_position="last")
    yield ChatGenerationChunk(message=end, generation_info=dict(metadata))


def _to_logprob(item: TokenLogprob) -> dict[str, Any]:
    is_whole = "\N{REPLACEMENT CHARACTER}" not in item.token
    return {
        "token": item.token,
        "logprob": item.logprob,
        # OpenAI's word for a token without a text of its own is null.
        "bytes": list(item.token.encode()) if is_whole else None,
    }
