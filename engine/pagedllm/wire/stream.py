"""Chunk <-> the JSON events of a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..api import Chunk, Usage
from ..errors import EngineError
from .calls import CallDecoder, encode_call_deltas
from .logprobs import Echo, decode_prompt_logprobs, encode_prompt_logprobs
from .outputs import (
    EXTENSION,
    AnswerForm,
    decode_logprobs,
    decode_reasoning,
    decode_usage,
    encode_logprobs,
    encode_usage,
    end_with_calls,
    finish_record,
    read_finish_record,
)

__all__ = ["DONE", "StreamDecoder", "StreamEncoder"]

DONE = "[DONE]"
"""The data of a stream's last event."""


class StreamEncoder:
    """Writes the events of one call.

    The role comes once for each choice; ``finish_reason`` is null until the choice's last event, which has nothing
    else of it.

    Args:
        form: How to write them.
        num_choices: Of each request of the call.
        echoes: One for each request whose texts begin with its prompt.
        prompt_tokens: Of each request, to put the usage so far into each event; empty: do not.
    """

    def __init__(
        self,
        form: AnswerForm,
        *,
        num_choices: int = 1,
        echoes: Sequence[Echo] = (),
        prompt_tokens: Sequence[int] = (),
    ) -> None:
        self._form = form
        self._num_choices = num_choices
        self._echoes = echoes
        self._prompt_tokens = prompt_tokens
        self._started: set[int] = set()
        self._num_chars: dict[int, int] = {}
        self._num_tokens = 0
        self._usages: list[Usage] = []

    def encode(self, chunk: Chunk, *, place: int = 0) -> list[dict[str, Any]]:
        """The events of a chunk: one, or two where a piece of a choice and its end come together.

        Args:
            place: Which of the call's requests it belongs to.
        """
        self._num_tokens += len(chunk.token_ids)
        if chunk.usage is not None:
            self._usages.append(chunk.usage)
        if chunk.finish_reason is None or not (chunk.text or chunk.reasoning or chunk.tool_calls):
            return [self._event(chunk, place)]
        piece = replace(
            chunk, finish_reason=None, stop_reason=None, usage=None, timings=None, hints=(), prompt_logprobs=None
        )
        end = replace(chunk, text="", reasoning="", tool_calls=(), token_ids=(), logprobs=None)
        return [self._event(piece, place), self._event(end, place)]

    def usage_event(self) -> dict[str, Any]:
        """The event that ends a stream whose client asked for the usage."""
        return self._form.head(is_chunk=True) | {"choices": [], "usage": encode_usage(self._usages)}

    def _event(self, chunk: Chunk, place: int) -> dict[str, Any]:
        index = place * self._num_choices + chunk.index
        echo = self._echoes[place] if self._echoes and index not in self._started else None
        choice: dict[str, Any] = {"index": index}
        if self._form.kind == "chat":
            choice["delta"] = _encode_delta(chunk, is_first=index not in self._started)
        else:
            choice["text"] = (echo.text if echo else "") + chunk.text
        offset = self._num_chars.get(index, 0)
        choice["logprobs"] = encode_logprobs(self._form, chunk.logprobs, offset=offset, echo=echo)
        choice |= {"finish_reason": chunk.finish_reason}
        if chunk.finish_reason is not None:
            choice["stop_reason"] = chunk.stop_reason
        if self._form.return_token_ids:
            choice["token_ids"] = list(chunk.token_ids)
        self._started.add(index)
        self._num_chars[index] = offset + len(choice.get("text", ""))
        event = self._form.head(is_chunk=True) | {"choices": [choice]}
        if chunk.usage is not None:
            record = finish_record(chunk.request_id, chunk.usage, chunk.timings, chunk.hints)
            event[EXTENSION] = {"requests": [record]}
        if chunk.prompt_logprobs is not None:
            event["prompt_logprobs"] = encode_prompt_logprobs(chunk.prompt_logprobs)
        if self._prompt_tokens:
            event["usage"] = self._usage_so_far()
        return event

    def _usage_so_far(self) -> dict[str, Any]:
        so_far = Usage(prompt_tokens=sum(self._prompt_tokens), completion_tokens=self._num_tokens, cached_tokens=0)
        cached = [
            replace(so_far, prompt_tokens=0, completion_tokens=0, cached_tokens=item.cached_tokens)
            for item in self._usages
        ]
        return encode_usage([so_far, *cached])


def _encode_delta(chunk: Chunk, *, is_first: bool) -> dict[str, Any]:
    """What is new of a chat's answer. The last delta is empty, as OpenAI's, unless it is also the first."""
    delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
    if chunk.reasoning:
        delta["reasoning_content"] = chunk.reasoning
    if chunk.tool_calls:
        delta["tool_calls"] = encode_call_deltas(chunk.tool_calls)
    is_empty = not (chunk.reasoning or chunk.tool_calls) and chunk.finish_reason is None
    return delta | ({"content": chunk.text} if chunk.text or is_first or is_empty else {})


class StreamDecoder:
    """Reads the events of a call with one request.

    A server that knows only OpenAI's fields tells the usage after the last text: the chunk that ends the last choice is
    held back until then, so that it carries the usage, as a request's last chunk must.

    Args:
        request_id: What the chunks shall say.
        num_choices: How many there are.
    """

    def __init__(self, request_id: str, *, num_choices: int = 1) -> None:
        self._request_id = request_id
        self._num_open = self._num_choices = num_choices
        self._calls = [CallDecoder() for _ in range(num_choices)]
        self._held: Chunk | None = None
        self._num_tokens = 0
        self._has_ended = False

    @property
    def has_ended(self) -> bool:
        """Whether the request's last chunk was returned."""
        return self._has_ended

    def decode(self, event: Mapping[str, Any]) -> list[Chunk]:
        """The chunks that an event completes.

        Raises:
            EngineError: It is no event of such a stream.
        """
        try:
            if not event["choices"]:
                return self._release(decode_usage(event.get("usage")))
            return [chunk for choice in event["choices"] for chunk in self._decode_choice(event, choice)]
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise EngineError(f"the server's stream holds no completion: {error!r}") from error

    def finish(self) -> list[Chunk]:
        """What is held back when the stream has ended; its usage is what could be counted.

        Raises:
            EngineError: The stream ended before its text did.
        """
        chunks = self._release(Usage(prompt_tokens=0, completion_tokens=self._num_tokens, cached_tokens=0))
        if not self._has_ended:
            raise EngineError("the server's stream ended before its answer did")
        return chunks

    def _decode_choice(self, event: Mapping[str, Any], choice: Mapping[str, Any]) -> list[Chunk]:
        delta = choice.get("delta") or {"content": choice.get("text")}
        index = choice.get("index", 0)
        calls = self._calls[index]
        tool_calls = calls.decode(delta.get("tool_calls"))
        token_ids = tuple(choice.get("token_ids") or ())
        prompt_logprobs = event.get("prompt_logprobs") or choice.get("prompt_logprobs")
        chunk = Chunk(
            request_id=self._request_id,
            text=delta.get("content") or "",
            token_ids=token_ids,
            index=index,
            reasoning=decode_reasoning(delta),
            tool_calls=tool_calls,
            logprobs=decode_logprobs(choice.get("logprobs"), token_ids),
            prompt_logprobs=None if prompt_logprobs is None else decode_prompt_logprobs(prompt_logprobs),
            finish_reason=choice.get("finish_reason"),
            stop_reason=choice.get("stop_reason"),
        )
        self._num_tokens += len(token_ids)
        records = (event.get(EXTENSION) or {}).get("requests")
        if records:
            usage, timings, hints = read_finish_record(records[0])
            self._has_ended = True
            return [replace(chunk, usage=usage, timings=timings, hints=hints)]
        if chunk.finish_reason is not None:
            self._num_open -= 1
            if self._num_open == 0:
                # Only where no extension tells of it, it is certain that the server is not ours.
                has_calls = calls.has_calls and self._num_choices == 1
                self._held = replace(chunk, finish_reason=end_with_calls(chunk.finish_reason, has_calls=has_calls))
                return []
        return [chunk]

    def _release(self, usage: Usage) -> list[Chunk]:
        if self._held is None:
            return []
        _, timings, hints = read_finish_record({})
        chunk, self._held, self._has_ended = self._held, None, True
        return [replace(chunk, usage=usage, timings=timings, hints=hints)]
