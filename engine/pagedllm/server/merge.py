"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from ..api import AsyncChunkStream, Chunk

__all__ = ["merged"]

# What one stream may be ahead of the consumer; engines merge what is not fetched.
_MAX_BUFFERED = 8


async def merged(streams: Sequence[AsyncChunkStream]) -> AsyncIterator[tuple[int, Chunk]]:
    """The chunks of all streams as they come, each with its stream's place; raises the first error of any."""
    if len(streams) == 1:
        async for chunk in streams[0]:
            yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, Chunk] | BaseException | None] = asyncio.Queue(_MAX_BUFFERED)
    tasks = [asyncio.create_task(_pump(place, stream, queue)) for place, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    place: int, stream: AsyncChunkStream, queue: asyncio.Queue[tuple[int, Chunk] | BaseException | None]
) -> None:
    try:
        async for chunk in stream:
            await queue.put((place, chunk))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
