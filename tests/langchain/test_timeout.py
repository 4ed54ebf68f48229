"""Rows 53: a call that takes too long is aborted, not left to run on."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from fake_engine import FakeEngine
from langchain_core.exceptions import ModelTimeoutError

from langchain_pagedllm import ChatPagedLLM, PagedLLM
from pagedllm.errors import PagedLLMError

BOTH = pytest.mark.parametrize("cls", [ChatPagedLLM, PagedLLM])


@pytest.fixture
def slow() -> FakeEngine:
    return FakeEngine(delay_s=0.01)


def check(engine: FakeEngine, started: float, error: BaseException) -> None:
    assert isinstance(error, PagedLLMError)
    assert "timeout=0.1" in str(error)
    assert time.perf_counter() - started < 2
    assert (engine.num_aborts, engine.stats().num_running) == (1, 0)


@BOTH
@pytest.mark.parametrize("way", ["invoke", "stream", "batch", "ainvoke", "astream", "abatch"])
async def test_timeout(cls: Any, way: str, slow: FakeEngine) -> None:
    model = cls(engine=slow, timeout=0.1, ignore_eos=True, max_tokens=4000)
    started = time.perf_counter()
    with pytest.raises(ModelTimeoutError) as caught:  # noqa: PT012 - one statement per way
        if way == "invoke":
            model.invoke("Hello")
        elif way == "stream":
            list(model.stream("Hello"))
        elif way == "batch":
            model.batch(["Hello"])
        elif way == "ainvoke":
            await model.ainvoke("Hello")
        elif way == "abatch":
            await model.abatch(["Hello"])
        else:
            async for _ in model.astream("Hello"):
                pass
    check(slow, started, caught.value)


@BOTH
async def test_per_call_timeout_and_none(cls: Any, slow: FakeEngine) -> None:
    model = cls(engine=slow, timeout=60, ignore_eos=True, max_tokens=4000)
    with pytest.raises(ModelTimeoutError):
        model.invoke("Hello", timeout=0.05)
    assert cls(engine=slow, max_tokens=40).invoke("Hello", timeout=30)
    assert await cls(engine=slow, max_tokens=40).ainvoke("Hello", timeout=30)


def test_slow_reader_is_no_timeout() -> None:
    """The time is the engine's: a consumer may read what is done as slowly as it likes."""

    class Eager(FakeEngine):
        """Computes ahead of its consumer, as a real engine does."""

        def stream(self, request: Any) -> Any:
            return iter(list(super().stream(request)))

    chunks = []
    for chunk in ChatPagedLLM(engine=Eager(), timeout=0.1, max_tokens=20).stream("Hello"):
        chunks.append(chunk)
        time.sleep(0.05)
    assert chunks[-1].response_metadata["finish_reason"] == "length"


def test_only_late_prompts_of_a_batch_fail(slow: FakeEngine) -> None:
    llm = PagedLLM(engine=slow, timeout=0.3, temperature=0)
    slow.chunk_size = 1
    answers = llm.batch(["Hello", "Hello you"], return_exceptions=True, stop=[" "])
    assert all(isinstance(answer, str) for answer in answers)
    answers = llm.batch(["Hello"], return_exceptions=True, max_tokens=3000, ignore_eos=True)
    assert isinstance(answers[0], ModelTimeoutError)


async def test_other_cancellation_is_not_taken_for_a_timeout(slow: FakeEngine) -> None:
    model = ChatPagedLLM(engine=slow, timeout=60, ignore_eos=True, max_tokens=4000)
    task = asyncio.create_task(model.ainvoke("Hello"))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_abort_from_elsewhere_is_an_answer(slow: FakeEngine) -> None:
    """Who aborts a request in the engine gets what there is, with the reason."""
    model = ChatPagedLLM(engine=slow, timeout=60, ignore_eos=True, max_tokens=4000)
    chunks = []
    for chunk in model.stream("Hello"):
        chunks.append(chunk)
        slow.abort(slow.requests[-1].request_id)
    assert chunks[-1].response_metadata["finish_reason"] == "abort"
