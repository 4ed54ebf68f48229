"""One buffer for each consumer: who is woken when, and what ends a wait."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from pagedllm.api import Chunk, Timings, Usage
from pagedllm.assemble import output_or_raise
from pagedllm.errors import EngineDeadError
from pagedllm.streams import AsyncChunks, Chunks, OutputStream, acollect_output, collect_output

NUM_TOKENS = 200  # far more than a buffer keeps apart
TEXTS = ["".join(f"{index}.{number} " for number in range(NUM_TOKENS)) for index in range(2)]


def make_pieces() -> list[Chunk]:
    """An answer of two choices, their tokens in turn; only the last chunk has usage."""
    chunks = [
        Chunk(
            request_id="r",
            index=index,
            text=f"{index}.{number} ",
            token_ids=(number,),
            finish_reason="length" if number == NUM_TOKENS - 1 else None,
        )
        for number in range(NUM_TOKENS)
        for index in range(2)
    ]
    usage = Usage(prompt_tokens=1, completion_tokens=2 * NUM_TOKENS, cached_tokens=0)
    return [*chunks[:-1], replace(chunks[-1], usage=usage, timings=Timings(queue_s=0.0, ttft_s=0.0, total_s=0.0))]


PIECES = make_pieces()


def never() -> None:
    raise AssertionError("nothing was to be aborted")


def put_all(stream: OutputStream) -> None:
    for chunk in PIECES:
        stream.put(chunk)


async def test_who_collects_is_woken_once(monkeypatch: pytest.MonkeyPatch):
    """32 answers of 100 tokens would wake their event loop 3,200 times, and take the engine's thread off the CPU."""
    stream, loop, wakes = OutputStream(), asyncio.get_running_loop(), []
    wake = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: wakes.append(args) or wake(*args))
    collecting = asyncio.ensure_future(acollect_output(AsyncChunks(stream, never)))
    for chunk in PIECES:
        await asyncio.sleep(0)  # who is woken runs, and waits again
        assert not wakes
        stream.put(chunk)
    assert output_or_raise(await collecting).choices[0].text == TEXTS[0]
    assert len(wakes) == 1


async def test_who_reads_is_woken_for_each_chunk_it_waits_for():
    stream = OutputStream()
    reader = AsyncChunks(stream, never)
    for chunk in PIECES:
        reading = asyncio.ensure_future(reader.__anext__())
        await asyncio.sleep(0)
        stream.put(chunk)
        assert await reading == chunk


@pytest.mark.parametrize("num_before", [0, 1, NUM_TOKENS, 2 * NUM_TOKENS])
def test_collected_before_or_after_it_came_is_the_same(num_before: int):
    """What came before anybody collected was merged as for a slow consumer, the rest was not."""
    stream = OutputStream()
    for chunk in PIECES[:num_before]:
        stream.put(chunk)
    thread = threading.Thread(target=lambda: [stream.put(chunk) for chunk in PIECES[num_before:]])
    thread.start()
    output = output_or_raise(collect_output(Chunks(stream, never)))
    thread.join()
    assert [choice.text for choice in output.choices] == TEXTS
    assert [choice.token_ids for choice in output.choices] == [tuple(range(NUM_TOKENS))] * 2


def test_the_rest_begins_where_reading_stopped():
    stream = OutputStream()
    put_all(stream)
    chunks = Chunks(stream, never)
    first = next(chunks)
    assert first.text + "".join(chunk.text for chunk in chunks.rest() if chunk.index == 0) == TEXTS[0]
    assert chunks.rest() == []
    assert list(chunks) == []


@pytest.mark.parametrize("num_before", [0, 5])
async def test_an_error_ends_every_wait_for_the_whole_answer(num_before: int):
    in_thread, in_loop = OutputStream(), OutputStream()
    collected: list[object] = []
    thread = threading.Thread(target=lambda: collected.append(collect_output(Chunks(in_thread, never))))
    thread.start()
    task = asyncio.ensure_future(acollect_output(AsyncChunks(in_loop, never)))
    await asyncio.sleep(0)
    for stream in (in_thread, in_loop):
        for chunk in PIECES[:num_before]:
            stream.put(chunk)
        stream.fail(EngineDeadError("gone"))
    await asyncio.to_thread(thread.join)
    for error in (*collected, await task):
        assert isinstance(error, EngineDeadError)


async def test_cancelling_who_collects_aborts_once():
    aborts: list[str] = []
    stream = OutputStream()
    task = asyncio.ensure_future(acollect_output(AsyncChunks(stream, lambda: aborts.append("abort"))))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    put_all(stream)  # comes too late, and finds nobody
    assert aborts == ["abort"]
