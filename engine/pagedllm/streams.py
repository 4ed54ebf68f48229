"""What lies between the worker and a consumer: a buffer that never blocks the one and wakes the other."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace

from .api import Chunk, RequestOutput, ToolCallDelta
from .assemble import assemble_output
from .errors import PagedLLMError

__all__ = ["AsyncChunks", "Chunks", "LateAsyncChunks", "OutputStream", "acollect_output", "collect_output"]

_MAX_BUFFERED_CHUNKS = 64


class OutputStream:
    """Chunks of one request on their way from the worker to one consumer, in a thread or an event loop.

    ``put`` and ``fail`` never block. A consumer that falls behind finds its deltas merged, so the buffer is bounded
    by the length of the text. One that wants the whole answer is woken once: 32 that were woken for each token would
    take several percent of the engine's speed.
    """

    def __init__(self) -> None:
        self._chunks: deque[Chunk] = deque()
        self._error: PagedLLMError | None = None
        self._is_collected = False  # the consumer waits for the end
        self._changed = threading.Condition()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    def put(self, chunk: Chunk) -> None:
        """Add a chunk (worker)."""
        with self._changed:
            is_behind = len(self._chunks) >= _MAX_BUFFERED_CHUNKS and not self._is_collected
            place = self._place_to_merge(chunk) if is_behind else None
            if place is None:
                self._chunks.append(chunk)
            else:
                self._chunks[place] = _merge(self._chunks[place], chunk)
            self._wake()

    def fail(self, error: PagedLLMError) -> None:
        """End the stream with an error, after what is buffered (any thread). The first error counts."""
        with self._changed:
            self._error = self._error or error
            self._wake()

    def get(self) -> Chunk:
        """The next chunk; blocks the calling thread. Raises the error that ended the stream."""
        with self._changed:
            while not self._is_ready():
                self._changed.wait()
            return self._take()

    def get_rest(self) -> list[Chunk]:
        """All chunks from the next to the request's last; blocks and raises as ``get``."""
        with self._changed:
            self._is_collected = True
            while not self._has_ended():
                self._changed.wait()
            return self._take_rest()

    async def aget(self) -> Chunk:
        """The next chunk, without blocking the event loop."""
        while True:
            with self._changed:
                if self._is_ready():
                    return self._take()
                future = self._make_waiter()
            await future

    async def aget_rest(self) -> list[Chunk]:
        """As ``get_rest``, without blocking the event loop."""
        while True:
            with self._changed:
                self._is_collected = True
                if self._has_ended():
                    return self._take_rest()
                future = self._make_waiter()
            await future

    def _make_waiter(self) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiter = (loop, future)
        return future

    def _place_to_merge(self, chunk: Chunk) -> int | None:
        """The last buffered chunk of the same choice. The request's last chunk stays last, so it is never merged."""
        if chunk.usage is not None:
            return None
        for place in range(len(self._chunks) - 1, -1, -1):
            if self._chunks[place].index == chunk.index:
                return place
        return None

    def _is_ready(self) -> bool:
        return bool(self._chunks) or self._error is not None

    def _has_last(self) -> bool:
        return bool(self._chunks) and self._chunks[-1].usage is not None

    def _has_ended(self) -> bool:
        return self._has_last() or self._error is not None

    def _take(self) -> Chunk:
        if self._chunks:
            return self._chunks.popleft()
        assert self._error is not None
        raise self._error

    def _take_rest(self) -> list[Chunk]:
        if self._has_last():
            chunks = list(self._chunks)
            self._chunks.clear()
            return chunks
        assert self._error is not None
        raise self._error

    def _wake(self) -> None:
        if self._is_collected and not self._has_ended():
            return
        self._changed.notify_all()
        if self._waiter is not None:
            (loop, future), self._waiter = self._waiter, None
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, future)


def _merge(first: Chunk, second: Chunk) -> Chunk:
    logprobs = None if first.logprobs is None else first.logprobs + (second.logprobs or ())
    return replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
        reasoning=first.reasoning + second.reasoning,
        tool_calls=_merge_calls(first.tool_calls + second.tool_calls),
    )


def _merge_calls(deltas: tuple[ToolCallDelta, ...]) -> tuple[ToolCallDelta, ...]:
    """The same calls in as few pieces as there are calls."""
    merged: list[ToolCallDelta] = []
    for delta in deltas:
        if merged and merged[-1].index == delta.index:
            merged[-1] = replace(merged[-1], arguments=merged[-1].arguments + delta.arguments)
        else:
            merged.append(delta)
    return tuple(merged)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():  # the consumer may have been cancelled meanwhile
        future.set_result(None)


class _ChunksBase:
    """An iterator that aborts its request when it is closed, interrupted or collected before the end.

    Args:
        stream: Where the chunks come from.
        abort: Ends the request; called at most once, from any thread, also by the garbage collector.
    """

    def __init__(self, stream: OutputStream, abort: Callable[[], None]) -> None:
        self._stream = stream
        self._abort = abort
        self._is_open = True

    def _seen(self, chunk: Chunk) -> Chunk:
        if chunk.usage is not None:  # the request's last chunk
            self._is_open = False
        return chunk

    def _fail(self, error: BaseException) -> None:
        """Note what interrupted the reading."""
        if isinstance(error, PagedLLMError):
            self._is_open = False  # the request has ended; an abort might hit another one of its name
        else:
            self._end()

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            self._abort()

    def __del__(self) -> None:
        self._end()


class Chunks(_ChunksBase):
    """The chunks of one request, for a thread."""

    def __iter__(self) -> Chunks:
        return self

    def __next__(self) -> Chunk:
        if not self._is_open:
            raise StopIteration
        try:
            return self._seen(self._stream.get())
        except BaseException as error:
            self._fail(error)
            raise

    def rest(self) -> list[Chunk]:
        """All chunks that are still to come, once the request has ended; cheaper than one after another."""
        if not self._is_open:
            return []
        try:
            chunks = self._stream.get_rest()
        except BaseException as error:
            self._fail(error)
            raise
        self._is_open = False
        return chunks

    def close(self) -> None:
        """Abort the request unless it has ended."""
        self._end()


class LateAsyncChunks:
    """The chunks of a request that begins when the first of them is asked for.

    Args:
        start: Begins the request; raises what is wrong with it.
    """

    def __init__(self, start: Callable[[], Awaitable[AsyncChunks]]) -> None:
        self._start: Callable[[], Awaitable[AsyncChunks]] | None = start
        self._chunks: AsyncChunks | None = None

    def __aiter__(self) -> LateAsyncChunks:
        return self

    async def __anext__(self) -> Chunk:
        if self._start is not None:
            start, self._start = self._start, None
            self._chunks = await start()
        if self._chunks is None:
            raise StopAsyncIteration
        return await self._chunks.__anext__()

    async def aclose(self) -> None:
        """Abort the request unless it has ended, or never begun."""
        self._start = None
        if self._chunks is not None:
            await self._chunks.aclose()


class AsyncChunks(_ChunksBase):
    """The chunks of one request, for an event loop."""

    def __aiter__(self) -> AsyncChunks:
        return self

    async def __anext__(self) -> Chunk:
        if not self._is_open:
            raise StopAsyncIteration
        try:
            return self._seen(await self._stream.aget())
        except BaseException as error:
            self._fail(error)
            raise

    async def rest(self) -> list[Chunk]:
        """As ``Chunks.rest``."""
        if not self._is_open:
            return []
        try:
            chunks = await self._stream.aget_rest()
        except BaseException as error:
            self._fail(error)
            raise
        self._is_open = False
        return chunks

    async def aclose(self) -> None:
        """Abort the request unless it has ended."""
        self._end()


def collect_output(stream: Chunks) -> RequestOutput | PagedLLMError:
    """Read a request's stream to its end; the answer, or the error with which the stream ended."""
    try:
        return assemble_output(stream.rest())
    except PagedLLMError as error:
        return error


async def acollect_output(stream: AsyncChunks) -> RequestOutput | PagedLLMError:
    """As ``collect_output``, in an event loop."""
    try:
        return assemble_output(await stream.rest())
    except PagedLLMError as error:
        return error
