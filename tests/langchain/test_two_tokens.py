"""How soon a real engine stops after its consumer did: within two tokens, whichever way the consumer went.

The engine is held up after some tokens until the consumer has gone, so that no race decides what it computes then.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import TinyModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableParallel

from langchain_pagedllm import ChatPagedLLM, PagedLLM, cancel_scope
from pagedllm.local import LocalEngine

PROMPT = ChatPromptTemplate.from_template("the cache holds {word}")
KINDS: dict[str, Callable[[Any], Any]] = {
    "model": lambda model: model,
    "prompt": lambda model: PROMPT | model,
    "parser": lambda model: PROMPT | model | StrOutputParser(),
}
INPUTS: dict[str, Any] = {"model": "the cache holds keys", "prompt": {"word": "keys"}, "parser": {"word": "keys"}}
NUM_FREE = 6


class Gate:
    """Lets an engine take some steps, and then none until it is opened."""

    def __init__(self) -> None:
        self._free = threading.Semaphore(NUM_FREE)
        self._open = threading.Event()
        self.is_reached = threading.Event()

    def pass_through(self, _record: Any) -> None:
        if self._open.is_set() or self._free.acquire(blocking=False):
            return
        self.is_reached.set()
        assert self._open.wait(120)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def engine(tiny_model: TinyModel, gate: Gate) -> Iterator[LocalEngine]:
    with LocalEngine(tiny_model.config(), on_step=gate.pass_through) as engine:
        yield engine
        gate.open()


@pytest.fixture(params=[ChatPagedLLM, PagedLLM])
def model(request: pytest.FixtureRequest, engine: LocalEngine) -> Any:
    return request.param(engine=engine, temperature=0, ignore_eos=True, max_tokens=400)


def check_stopped(engine: LocalEngine, gate: Gate, num_requests: int = 1) -> None:
    """Of each request one step was under way, and one may have begun before it heard of the end."""
    gate.open()
    deadline = time.monotonic() + 60
    while (stats := engine.stats()).num_running or stats.num_waiting:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert stats.num_generated_tokens <= num_requests * (NUM_FREE + 2)
    assert stats.num_referenced_blocks == 0


@pytest.mark.parametrize("kind", ["model", "prompt"])
def test_break(kind: str, model: Any, engine: LocalEngine, gate: Gate) -> None:
    for _ in KINDS[kind](model).stream(INPUTS[kind]):
        assert gate.is_reached.wait(60)
        break
    check_stopped(engine, gate)


@pytest.mark.parametrize("kind", list(KINDS))
async def test_closing_an_async_stream(kind: str, model: Any, engine: LocalEngine, gate: Gate) -> None:
    stream = KINDS[kind](model).astream(INPUTS[kind])
    await anext(stream)
    await asyncio.to_thread(gate.is_reached.wait, 60)
    await stream.aclose()
    await asyncio.to_thread(check_stopped, engine, gate)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("way", ["ainvoke", "abatch", "astream", "astream_events"])
@pytest.mark.parametrize("how", ["cancel", "wait_for"])
async def test_cancelled_task(how: str, way: str, kind: str, model: Any, engine: LocalEngine, gate: Gate) -> None:
    runnable = KINDS[kind](model)

    async def run() -> Any:
        if way == "ainvoke":
            return await runnable.ainvoke(INPUTS[kind])
        if way == "abatch":
            return await runnable.abatch([INPUTS[kind]])
        return [item async for item in getattr(runnable, way)(INPUTS[kind])]

    if how == "wait_for":
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(run(), 0.5)
    else:
        task = asyncio.create_task(run())
        await asyncio.to_thread(gate.is_reached.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await asyncio.to_thread(check_stopped, engine, gate)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("way", ["invoke", "stream", "batch"])
def test_cancel_scope(way: str, kind: str, model: Any, engine: LocalEngine, gate: Gate) -> None:
    """From another thread, for calls that give nothing back before their end."""
    runnable = KINDS[kind](model)
    with cancel_scope() as scope:

        def cancel() -> None:
            assert gate.is_reached.wait(60)
            scope.cancel()
            gate.open()

        thread = threading.Thread(target=cancel)
        thread.start()
        if way == "invoke":
            runnable.invoke(INPUTS[kind])
        elif way == "batch":
            runnable.batch([INPUTS[kind]])
        else:
            list(runnable.stream(INPUTS[kind]))
        thread.join()
    check_stopped(engine, gate)


def test_cancel_scope_around_parallel_steps(model: Any, engine: LocalEngine, gate: Gate) -> None:
    steps = RunnableParallel(a=KINDS["prompt"](model), b=KINDS["parser"](model))
    with cancel_scope() as scope:

        def cancel() -> None:
            assert gate.is_reached.wait(60)
            scope.cancel()
            gate.open()

        thread = threading.Thread(target=cancel)
        thread.start()
        steps.invoke(INPUTS["prompt"])
        thread.join()
    check_stopped(engine, gate, num_requests=2)
