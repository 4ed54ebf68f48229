"""Ending a request early: nothing is left behind, here or on the server; and many requests at once."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
from typing import Any

import pytest
from remote_ways import Endless, Ways, agenerate, answer, astream, chat, generate, stream
from scripted_server import Exchange, chat_event

from pagedllm.errors import (
    EngineClosedError,
    InvalidRequestError,
)


def test_dropped_stream(make: Any) -> None:
    """A consumer that breaks off leaves nothing behind on the server."""
    endless = Endless()
    _, engine = make(endless)
    for _ in engine.stream(chat()):
        break
    gc.collect()
    assert endless.ended.wait(5)


def test_closed_stream_frees_its_place(make: Any) -> None:
    endless = Endless()
    _, engine = make([endless, answer], max_connections=1)
    chunks = engine.stream(chat())
    next(chunks)
    chunks.close()
    assert endless.ended.wait(5)
    assert generate(engine, chat()) == "Hello!"


@pytest.mark.parametrize("how", ["aclose", "drop", "cancel"])
async def test_async_stream_ends(make: Any, how: str) -> None:
    endless = Endless()
    _, engine = make(endless)
    chunks = engine.astream(chat())
    await anext(chunks)
    if how == "aclose":
        await chunks.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(chunks)
    elif how == "drop":
        del chunks
        gc.collect()
    else:

        async def consume() -> None:
            async for _ in chunks:
                pass

        task = asyncio.create_task(consume())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await asyncio.to_thread(endless.ended.wait, 5)
    await engine.aclose()


@pytest.mark.parametrize("ask", [generate, stream])
def test_abort_from_another_thread(make: Any, ask: Ways) -> None:
    """A thread that waits for an answer can be reached only through its socket."""
    endless = Endless()
    _, engine = make([endless, answer])
    asked = chat()
    results: list[Any] = []
    run = engine.generate if ask is generate else lambda requests: list(engine.stream(requests[0]))
    thread = threading.Thread(target=lambda: results.extend(run([asked])))
    thread.start()
    assert endless.begun.wait(5)
    engine.abort("another")
    engine.abort(asked.request_id)
    thread.join(5)
    assert not thread.is_alive()
    assert endless.ended.wait(5)
    last = results[-1]
    assert (last.choices[0] if ask is generate else last).finish_reason == "abort"
    assert last.usage is not None
    assert generate(engine, chat()) == "Hello!"


@pytest.mark.parametrize("from_thread", [False, True])
@pytest.mark.parametrize("ask", [agenerate, astream])
async def test_abort_in_event_loop(make: Any, ask: Ways, from_thread: bool) -> None:
    endless = Endless()
    _, engine = make(endless)
    asked = chat()

    async def run() -> Any:
        if ask is agenerate:
            return (await engine.agenerate([asked]))[0].choices[0]
        return [chunk async for chunk in engine.astream(asked)][-1]

    task = asyncio.create_task(run())
    assert await asyncio.to_thread(endless.begun.wait, 5)
    if from_thread:
        await asyncio.to_thread(engine.abort, asked.request_id)
    else:
        engine.abort(asked.request_id)
    assert (await asyncio.wait_for(task, 5)).finish_reason == "abort"
    assert await asyncio.to_thread(endless.ended.wait, 5)
    await engine.aclose()


async def test_cancelled_agenerate(make: Any) -> None:
    endless = Endless()
    _, engine = make(endless)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(engine.agenerate([chat(), chat()]), 0.2)
    assert await asyncio.to_thread(endless.ended.wait, 5)
    await engine.aclose()


def test_abort_while_waiting_for_a_connection_and_between_retries(make: Any) -> None:
    """Both waits are ours, so nobody else can end them."""
    endless = Endless()
    _, engine = make([endless, lambda exchange: exchange.json({}, 503, Retry_After="50")], max_connections=1)
    holder = engine.stream(chat())
    next(holder)
    asked, results = chat(), []
    thread = threading.Thread(target=lambda: results.extend(engine.generate([asked])))
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    engine.abort(asked.request_id)
    thread.join(5)
    assert results[0].choices[0].finish_reason == "abort"

    holder.close()
    thread = threading.Thread(target=lambda: results.extend(engine.generate([asked])))
    thread.start()
    time.sleep(0.3)
    assert thread.is_alive()
    engine.abort(asked.request_id)
    thread.join(5)
    assert results[1].choices[0].finish_reason == "abort"


@pytest.mark.parametrize("ask", [generate, stream, agenerate, astream])
def test_closed_engine(make: Any, ask: Ways) -> None:
    """Closing fails what is in flight, and everything after it, with one class."""
    endless = Endless()
    _, engine = make(endless)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            ask(engine, chat())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert endless.begun.wait(5)
    engine.close()
    thread.join(5)
    assert [type(error) for error in errors] == [EngineClosedError]
    assert endless.ended.wait(5)
    with pytest.raises(EngineClosedError):
        ask(engine, chat())
    with pytest.raises(EngineClosedError):
        engine.stats()


# --- Many ---


def test_generate_runs_requests_together(make: Any) -> None:
    """One after the other, a batch would take as long as all of it."""
    barrier = threading.Barrier(4)

    def answer_together(exchange: Exchange) -> None:
        barrier.wait(10)
        answer(exchange)

    _, engine = make(answer_together)
    assert [output.text for output in engine.generate([chat() for _ in range(4)])] == ["Hello!"] * 4
    assert [output.text for output in asyncio.run(engine.agenerate([chat() for _ in range(4)]))] == ["Hello!"] * 4
    assert engine.generate([]) == []


@pytest.mark.parametrize("ask", [generate, agenerate])
def test_connections_are_bounded_and_kept(make: Any, ask: Ways) -> None:
    """Unbounded, a batch of a thousand would open a thousand; not kept, each request would make one."""
    running, most, lock = 0, 0, threading.Lock()

    def count(exchange: Exchange) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        answer(exchange)

    server, engine = make(count, max_connections=3)
    requests = [chat() for _ in range(12)]
    outputs = engine.generate(requests) if ask is generate else asyncio.run(engine.agenerate(requests))
    assert [output.request_id for output in outputs] == [item.request_id for item in requests]
    assert most == 3
    assert server.num_connections == 3


def test_error_of_one_request_is_its_own(make: Any) -> None:
    def answer_or_refuse(exchange: Exchange) -> None:
        if exchange.body["max_tokens"] == 7:
            exchange.json({"error": {"message": "no", "param": "max_tokens"}}, 400)
        else:
            answer(exchange)

    _, engine = make(answer_or_refuse)
    first, second, third = engine.generate([chat(), chat(max_tokens=7), chat()])
    assert (first.text, third.text) == ("Hello!", "Hello!")
    assert isinstance(second, InvalidRequestError)
    assert second.param == "max_tokens"


def test_request_id_in_flight(make: Any) -> None:
    """Two requests of one name could not be told apart by ``abort``."""
    _, engine = make(Endless())
    asked = chat()
    chunks = engine.stream(asked)
    next(chunks)
    with pytest.raises(InvalidRequestError, match="in flight already"):
        generate(engine, asked)
    chunks.close()


def test_interrupted_batch(make: Any) -> None:
    """Ctrl-C while a batch is under way must not wait for its end."""
    endless = Endless()
    _, engine = make(endless)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        engine.generate([chat(), chat()])
    assert time.perf_counter() - started < 5
    assert endless.ended.wait(5)


def test_event_loops_one_after_the_other(make: Any) -> None:
    """A client that outlives its loop fails in the next one; one that is not closed with it leaks its sockets."""
    server, engine = make(answer)
    for _ in range(3):
        assert astream(engine, chat()) == "Hello!"
    gc.collect()
    assert server.num_connections == 3


def test_threads_and_loops_at_once(make: Any) -> None:
    _, engine = make(answer, max_connections=2)
    results: list[str] = []
    asks = (generate, stream, agenerate, astream) * 3
    threads = [threading.Thread(target=lambda ask=ask: results.append(ask(engine, chat()))) for ask in asks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == ["Hello!"] * 12


async def test_slow_consumer_stops_the_reading(make: Any) -> None:
    """Without a bound, a consumer that waits would collect the whole answer in memory."""
    sent = 0

    def flood(exchange: Exchange) -> None:
        nonlocal sent
        exchange.begin_events()
        for _ in range(3000):
            exchange.event(chat_event("x" * 10_000))
            sent += 1
        exchange.event(chat_event("", "stop"))
        exchange.event("[DONE]")
        exchange.end_events()

    _, engine = make(flood)
    chunks = engine.astream(chat())
    await anext(chunks)
    await asyncio.sleep(0.5)
    assert sent < 2000
    assert sum([len(chunk.text) async for chunk in chunks]) == 2999 * 10_000
    await engine.aclose()
