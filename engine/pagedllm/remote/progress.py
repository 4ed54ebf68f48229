"""What has arrived of a streamed answer, so that it can be ended in good order where it was cut off."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator

import httpx
import httpx_sse

from ..api import Choice, Chunk, GenerateRequest, RequestOutput, Timings, Usage
from ..errors import EngineError
from ..wire import DONE, StreamDecoder
from .http_errors import event_error

__all__ = ["Progress", "aborted_output", "with_timings"]

_UNKNOWN = Timings(queue_s=0.0, ttft_s=0.0, total_s=0.0)


class Progress:
    """Reads the events of one request's answer and knows what is still missing.

    Args:
        request: What was asked for.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._decoder = StreamDecoder(request.request_id, num_choices=request.sampling.n)
        self._open = set(range(request.sampling.n))
        self._num_tokens = 0
        self._start = time.perf_counter()
        self._first: float | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the request's last chunk has come."""
        return self._decoder.has_ended

    def read(self, event: httpx_sse.ServerSentEvent, response: httpx.Response) -> Iterator[Chunk]:
        """The chunks that an event completes.

        Raises:
            PagedLLMError: It tells of an error, or is no event of such a stream.
        """
        if event.data == DONE:
            yield from self.finish()
        elif event.data:
            try:
                value = json.loads(event.data)
            except ValueError as error:
                raise EngineError("the server's stream holds an event that is no JSON") from error
            if not isinstance(value, dict) or value.get("error") is not None:
                raise event_error(value if isinstance(value, dict) else {}, response)
            yield from map(self._seen, self._decoder.decode(value))

    def finish(self) -> Iterator[Chunk]:
        """What was held back, at the stream's end.

        Raises:
            EngineError: The answer has not ended.
        """
        if not self.has_ended:
            yield from map(self._seen, self._decoder.finish())

    def abort(self) -> Iterator[Chunk]:
        """The end of an answer that was cut off here: the server cannot tell any more what it had counted."""
        open_choices = sorted(self._open)
        for index in open_choices:
            chunk = Chunk(
                request_id=self._request.request_id, text="", token_ids=(), index=index, finish_reason="abort"
            )
            if index == open_choices[-1]:
                usage = Usage(prompt_tokens=0, completion_tokens=self._num_tokens, cached_tokens=0)
                chunk = dataclasses.replace(chunk, usage=usage, timings=self._timings())
            yield chunk

    def _seen(self, chunk: Chunk) -> Chunk:
        if self._first is None and (chunk.token_ids or chunk.text):
            self._first = time.perf_counter()
        self._num_tokens += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            self._open.discard(chunk.index)
        if chunk.usage is not None and chunk.timings in (None, _UNKNOWN):
            return dataclasses.replace(chunk, timings=self._timings())
        return chunk

    def _timings(self) -> Timings:
        """As seen from here, where a server does not tell; how long it let the request wait is not known."""
        now = time.perf_counter()
        return Timings(queue_s=0.0, ttft_s=(self._first or now) - self._start, total_s=now - self._start)


def with_timings(output: RequestOutput, start: float) -> RequestOutput:
    """The output with times as seen from here, if the server did not tell any.

    Args:
        start: When the request was sent, of ``time.perf_counter``.
    """
    if output.timings != _UNKNOWN:
        return output
    total_s = time.perf_counter() - start
    return dataclasses.replace(output, timings=Timings(queue_s=0.0, ttft_s=total_s, total_s=total_s))


def aborted_output(request: GenerateRequest) -> RequestOutput:
    """The answer to a request that was aborted before it came: no text, and nothing counted."""
    indices = range(request.sampling.n)
    return RequestOutput(
        request_id=request.request_id,
        choices=tuple(Choice(text="", token_ids=(), finish_reason="abort", index=index) for index in indices),
        usage=Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0),
        timings=_UNKNOWN,
    )
