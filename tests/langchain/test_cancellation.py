"""What nobody waits for any more must not be computed on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from fake_engine import FakeEngine
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableParallel
from served_engine import served

from langchain_pagedllm import ChatPagedLLM, PagedLLM, cancel_scope
from langchain_pagedllm.errors import RequestCancelledError

NUM_TOKENS = 2000
PROMPT = ChatPromptTemplate.from_template("Say {word}")
CHAINS: dict[str, Callable[[Any], Any]] = {
    "model": lambda model: model,
    "prompt": lambda model: PROMPT | model,
    "parser": lambda model: PROMPT | model | StrOutputParser(),
}
INPUTS: dict[str, Any] = {"model": "Say x", "prompt": {"word": "x"}, "parser": {"word": "x"}}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(chunk_size=1, delay_s=0.002)


@pytest.fixture(params=[ChatPagedLLM, PagedLLM])
def model(request: pytest.FixtureRequest, engine: FakeEngine) -> Any:
    return request.param(engine=engine, ignore_eos=True, max_tokens=NUM_TOKENS)


def generated(engine: FakeEngine) -> int:
    return engine.stats().num_generated_tokens


async def ended(engine: FakeEngine) -> None:
    for _ in range(500):
        if engine.stats().num_running == 0 and engine.requests:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("still running")


@pytest.mark.parametrize("kind", ["model", "prompt"])
def test_break_ends_a_sync_stream(kind: str, model: Any, engine: FakeEngine) -> None:
    for number, _ in enumerate(CHAINS[kind](model).stream(INPUTS[kind])):
        if number == 4:
            break
    assert engine.num_aborts == 1
    assert generated(engine) <= 5 + 2


@pytest.mark.parametrize("kind", ["model", "prompt", "parser"])
async def test_break_ends_an_async_stream(kind: str, model: Any, engine: FakeEngine) -> None:
    stream = CHAINS[kind](model).astream(INPUTS[kind])
    number = 0
    async for _ in stream:
        number += 1
        if number == 5:
            break
    await stream.aclose()
    await ended(engine)
    assert engine.num_aborts == 1
    assert generated(engine) <= 5 + 2


@pytest.mark.parametrize("kind", ["model", "prompt", "parser"])
@pytest.mark.parametrize("way", ["invoke", "stream", "events"])
async def test_wait_for_ends_the_request(kind: str, way: str, model: Any, engine: FakeEngine) -> None:
    chain = CHAINS[kind](model)

    async def run() -> Any:
        if way == "invoke":
            return await chain.ainvoke(INPUTS[kind])
        stream = chain.astream_events(INPUTS[kind]) if way == "events" else chain.astream(INPUTS[kind])
        return [item async for item in stream]

    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(run(), 0.1)
    await ended(engine)
    assert engine.num_aborts == 1
    assert generated(engine) < NUM_TOKENS


def test_langchain_drains_a_sync_chain_with_a_parser(model: Any, engine: FakeEngine) -> None:
    """If this fails, LangChain no longer reads the rest: take the warning out of cancel_scope and the docs."""
    engine.delay_s = 0.0
    for _ in CHAINS["parser"](model).stream(INPUTS["parser"]):
        break
    assert engine.num_aborts == 0
    assert generated(engine) == NUM_TOKENS


@pytest.mark.parametrize("kind", ["model", "prompt", "parser"])
def test_cancel_scope_ends_any_sync_chain(kind: str, model: Any, engine: FakeEngine) -> None:
    with cancel_scope() as scope:
        for number, _ in enumerate(CHAINS[kind](model).stream(INPUTS[kind])):
            if number == 4:
                scope.cancel()
                break
    assert engine.stats().num_running == 0
    assert engine.num_aborts == 1
    assert generated(engine) <= 5 + 2


def test_a_cancelled_stream_tells_so(engine: FakeEngine) -> None:
    model = ChatPagedLLM(engine=engine, ignore_eos=True, max_tokens=NUM_TOKENS)
    last = None
    with cancel_scope() as scope:
        for chunk in model.stream("Hello"):
            last = chunk
            scope.cancel()
    assert last is not None
    assert last.response_metadata["finish_reason"] == "abort"


def test_leaving_the_block_ends_what_is_left_of_it(model: Any, engine: FakeEngine) -> None:
    """A stream that somebody still holds is not collected, and would run to its end."""
    with cancel_scope() as scope:
        stream = CHAINS["parser"](model).stream(INPUTS["parser"])
        next(stream)
    assert scope.is_cancelled
    assert len(list(stream)) <= 2
    assert engine.num_aborts == 1


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "batch", "parallel"])
def test_cancelling_from_another_thread(way: str, model: Any, engine: FakeEngine) -> None:
    """Calls that give no piece before the end can only be ended from elsewhere; also those in chains' own threads."""
    num_requests = 1 if way in ("invoke", "ainvoke") else 3
    with cancel_scope() as scope:

        def cancel() -> None:
            while len(engine.requests) < num_requests:
                time.sleep(0.005)
            scope.cancel()

        thread = threading.Thread(target=cancel)
        thread.start()
        if way == "invoke":
            model.invoke("Hello")
        elif way == "ainvoke":
            asyncio.run(model.ainvoke("Hello"))
        elif way == "batch":
            model.batch(["a", "b", "c"])
        else:
            RunnableParallel(a=model, b=model, c=model).invoke("Hello")
        thread.join()
    assert engine.num_aborts == num_requests
    assert engine.stats().num_running == 0


def test_no_step_begins_after_it(model: Any, engine: FakeEngine) -> None:
    with cancel_scope() as scope:
        scope.cancel()
        with pytest.raises(RequestCancelledError, match="cancel_scope"):
            model.invoke("Hello")
        with pytest.raises(RequestCancelledError):
            next(iter(model.stream("Hello")))
    assert engine.requests == []
    engine.delay_s = 0.0
    assert model.invoke("Hello", max_tokens=3)


def test_scopes_nest(model: Any, engine: FakeEngine) -> None:
    with cancel_scope() as outer:
        with cancel_scope() as inner:
            next(iter(model.stream("Hello")))
        assert inner.is_cancelled
        assert not outer.is_cancelled
        assert model.invoke("Hello", max_tokens=3)
        with cancel_scope():
            outer.cancel()
            with pytest.raises(RequestCancelledError):
                model.invoke("Hello", max_tokens=3)


def test_scope_reaches_a_server(engine: FakeEngine) -> None:
    """Row: a client that only stops listening leaves the server generating."""
    with served(engine) as url:
        model = ChatPagedLLM(base_url=url, ignore_eos=True, max_tokens=NUM_TOKENS)
        with cancel_scope() as scope:
            for number, _ in enumerate((PROMPT | model | StrOutputParser()).stream({"word": "x"})):
                if number == 4:
                    scope.cancel()
                    break
        asyncio.run(ended(engine))
    assert engine.num_aborts == 1
    assert generated(engine) < NUM_TOKENS
