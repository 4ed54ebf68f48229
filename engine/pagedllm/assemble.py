"""One output from the chunks of a request."""

from __future__ import annotations

from collections.abc import Sequence

from .api import Choice, Chunk, RequestOutput, ToolCall, ToolCallDelta
from .errors import PagedLLMError

__all__ = ["assemble_output", "output_or_raise"]


def output_or_raise(output: RequestOutput | PagedLLMError) -> RequestOutput:
    """The answer; raises what stands in its place."""
    if isinstance(output, PagedLLMError):
        raise output
    return output


def assemble_output(chunks: Sequence[Chunk]) -> RequestOutput:
    """The whole answer of all chunks of a request, in the order in which they came."""
    last = chunks[-1]
    assert last.usage is not None
    assert last.timings is not None
    by_index: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        by_index.setdefault(chunk.index, []).append(chunk)
    return RequestOutput(
        request_id=last.request_id,
        choices=tuple(_assemble_choice(by_index[index]) for index in sorted(by_index)),
        usage=last.usage,
        timings=last.timings,
        prompt_logprobs=last.prompt_logprobs,
        hints=last.hints,
    )


def _assemble_choice(chunks: Sequence[Chunk]) -> Choice:
    last = chunks[-1]
    assert last.finish_reason is not None
    has_logprobs = any(chunk.logprobs is not None for chunk in chunks)
    return Choice(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        finish_reason=last.finish_reason,
        index=last.index,
        stop_reason=last.stop_reason,
        logprobs=tuple(item for chunk in chunks for item in chunk.logprobs or ()) if has_logprobs else None,
        reasoning="".join(chunk.reasoning for chunk in chunks),
        tool_calls=_assemble_calls([delta for chunk in chunks for delta in chunk.tool_calls]),
    )


def _assemble_calls(deltas: Sequence[ToolCallDelta]) -> tuple[ToolCall, ...]:
    begun = [delta for delta in deltas if delta.name is not None]
    arguments = ["".join(delta.arguments for delta in deltas if delta.index == first.index) for first in begun]
    return tuple(
        ToolCall(id=str(first.id), name=str(first.name), arguments=text)
        for first, text in zip(begun, arguments, strict=True)
    )
