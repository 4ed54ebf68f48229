"""LangChain messages to the engine's, and the engine's answers to LangChain's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
)
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from pagedllm.api import Choice, Chunk, Message, RequestOutput, Timings, Usage
from pagedllm.errors import InvalidRequestError

__all__ = [
    "PROVIDER",
    "to_chat_chunks",
    "to_chat_result",
    "to_messages",
    "to_response_metadata",
    "to_usage_metadata",
]

# LangChain compares a message's model_provider with the model's ls_provider, so both come from here.
PROVIDER = "pagedllm"

# What a model thought in an earlier turn; chat templates do not expect it back.
_DROPPED_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning"})


def to_messages(messages: Sequence[BaseMessage]) -> tuple[Message, ...]:
    """Convert a chat.

    Neighbours of one role become one message, joined by a newline as ``merge_message_runs`` does: many chat templates
    raise unless the roles alternate. ``name`` is not passed on; chat templates have no place for it.

    Args:
        messages: System, human, AI and role messages; content is a string or a list of strings and text parts.

    Raises:
        InvalidRequestError: Naming the message type or the content part that cannot be given to the model.
    """
    merged: list[Message] = []
    for message in messages:
        role, text = _role(message), _text(message)
        if merged and merged[-1].role == role:
            text = "\n".join(part for part in (merged.pop().content, text) if part)
        merged.append(Message(role=role, content=text))
    return tuple(merged)


def to_usage_metadata(usage: Usage) -> UsageMetadata:
    """Token counts in LangChain's words; ``cache_read`` is what the prefix cache served."""
    # mypy as Python 3.10 does not know the NotRequired that langchain-core takes from typing.
    return UsageMetadata(  # type: ignore[typeddict-item]
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_token_details={"cache_read": usage.cached_tokens},
    )


def to_response_metadata(
    end: Chunk | Choice, *, request_id: str, timings: Timings | None, model_name: str
) -> dict[str, Any]:
    """What is told about an answer once, at its end: who gave it, why it ended, where the time went."""
    metadata: dict[str, Any] = {
        "model_name": model_name,
        "model_provider": PROVIDER,
        "finish_reason": end.finish_reason,
        "request_id": request_id,
    }
    if end.stop_reason is not None:
        metadata["stop_reason"] = end.stop_reason
    if timings is not None:
        metadata["timings"] = dataclasses.asdict(timings)
    return metadata


def to_chat_result(output: RequestOutput, *, model_name: str) -> ChatResult:
    """Convert a whole answer."""
    choice = output.choices[0]
    metadata = to_response_metadata(choice, request_id=output.request_id, timings=output.timings, model_name=model_name)
    message = AIMessage(content=choice.text, response_metadata=metadata, usage_metadata=to_usage_metadata(output.usage))
    return ChatResult(generations=[ChatGeneration(message=message, generation_info=dict(metadata))])


def to_chat_chunks(chunk: Chunk, *, model_name: str, stream_usage: bool) -> Iterator[ChatGenerationChunk]:
    """Convert a piece of a streamed answer: a chunk of text if there is any, then the end as a chunk of its own.

    LangChain adds chunks up, scalars included, so everything but text and the provider's name comes once, with the end.
    The end carries no text because LangChain's event stream loses what shares a chunk with ``chunk_position``.
    """
    if chunk.text:
        yield ChatGenerationChunk(
            message=AIMessageChunk(content=chunk.text, response_metadata={"model_provider": PROVIDER})
        )
    if chunk.finish_reason is None:
        return
    metadata = to_response_metadata(chunk, request_id=chunk.request_id, timings=chunk.timings, model_name=model_name)
    usage = to_usage_metadata(chunk.usage) if stream_usage and chunk.usage is not None else None
    end = AIMessageChunk(content="", response_metadata=metadata, usage_metadata=usage, chunk_position="last")
    yield ChatGenerationChunk(message=end, generation_info=dict(metadata))


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    if isinstance(message, SystemMessage):
        return "system"
    if isinstance(message, HumanMessage):
        return "user"
    if isinstance(message, AIMessage) and not message.tool_calls:
        return "assistant"
    what = f"{type(message).__name__} with tool_calls" if isinstance(message, AIMessage) else type(message).__name__
    raise InvalidRequestError(
        f"{what} is not supported yet: only system, human, AI and chat messages", param="messages"
    )


def _text(message: BaseMessage) -> str:
    content: Any = message.content
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_part_text(part) for part in content)


def _part_text(part: str | Mapping[str, Any]) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text")
    if kind in _DROPPED_PARTS:
        return ""
    text = part.get("text")
    if kind != "text" or not (text is None or isinstance(text, str)):
        raise InvalidRequestError(f"content part of type {kind!r} is not supported: only text", param="messages")
    return text or ""
