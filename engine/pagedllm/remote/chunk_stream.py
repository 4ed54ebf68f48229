"""Chunks between the task that reads a connection and the one consumer in the same event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from ..api import Chunk
from ..errors import EngineError

__all__ = ["AsyncChunkReader", "Mailbox"]

# A consumer that falls behind by so many stops the reading; the server then sees a slow client.
_MAX_WAITING = 64


class Mailbox:
    """A buffer with one reader and one writer, both of one event loop."""

    def __init__(self) -> None:
        self._chunks: deque[Chunk] = deque()
        self._has_ended = False
        self._error: BaseException | None = None
        self._arrived = asyncio.Event()
        self._has_room = asyncio.Event()

    async def put(self, chunk: Chunk) -> None:
        """Add a chunk, and wait while the reader is far behind."""
        self.put_now(chunk)
        while len(self._chunks) >= _MAX_WAITING:
            self._has_room.clear()
            await self._has_room.wait()

    def put_now(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._arrived.set()

    def end(self, error: BaseException | None = None) -> None:
        """End the stream after what is there; the first end counts."""
        if not self._has_ended:
            self._has_ended, self._error = True, error
            self._arrived.set()

    async def get(self) -> Chunk:
        """The next chunk.

        Raises:
            StopAsyncIteration: There is no more.
            BaseException: What ended the stream.
        """
        while not self._chunks:
            if self._has_ended:
                raise self._error or StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        chunk = self._chunks.popleft()
        self._has_room.set()
        return chunk


class AsyncChunkReader:
    """Iterates over chunks that a task of its own reads; closing, cancelling or dropping it ends the task.

    A task, because whoever aborts the request must be able to end the wait for the server without cancelling the
    consumer, and because a consumer may run each step in another task (``asyncio.wait_for``).

    Args:
        read: Puts the chunks into a mailbox and ends it. It must not refer to this object.
    """

    def __init__(self, read: Callable[[Mailbox], Coroutine[Any, Any, None]]) -> None:
        self._read = read
        self._mailbox: Mailbox | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_open = True

    def __aiter__(self) -> AsyncChunkReader:
        return self

    async def __anext__(self) -> Chunk:
        if not self._is_open:
            raise StopAsyncIteration
        if self._mailbox is None:
            self._mailbox = Mailbox()
            self._task = asyncio.get_running_loop().create_task(_run(self._read, self._mailbox))
        try:
            return await self._mailbox.get()
        except BaseException:
            self._cancel()
            raise

    async def aclose(self) -> None:
        """End the request unless it has ended, and wait until its connection is free."""
        self._cancel()
        if self._task is not None and self._task.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([self._task])

    def _cancel(self) -> None:
        self._is_open = False
        if self._task is not None and not self._task.done():
            # Also for the garbage collector, which may run in any thread.
            with suppress(RuntimeError):  # the loop is closed, and its tasks with it
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    def __del__(self) -> None:
        self._cancel()


async def _run(read: Callable[[Mailbox], Coroutine[Any, Any, None]], mailbox: Mailbox) -> None:
    try:
        await read(mailbox)
    except asyncio.CancelledError:
        # By the consumer, who does not wait any more; or by somebody else, and then it must not look like an end.
        mailbox.end(EngineError("the task that reads the answer was cancelled"))
        raise
    except BaseException as error:
        # Whatever it was: who waits for the next chunk must hear of it.
        mailbox.end(error)
    finally:
        mailbox.end()
