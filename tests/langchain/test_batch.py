"""Batches of chats, and many threads over one adapter."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake_engine import FakeEngine
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from langchain_pagedllm import ChatPagedLLM, PagedLLM
from pagedllm.errors import ContextLengthError, InvalidRequestError

BOTH = pytest.mark.parametrize("cls", [ChatPagedLLM, PagedLLM])


def text_of(answer: Any) -> Any:
    return getattr(answer, "text", answer)


async def test_all_inputs_reach_the_engine_at_once(engine: FakeEngine, chat: ChatPagedLLM) -> None:
    """Row 51: LangChain's default runs six at a time on two cores."""
    engine.delay_s = 0.01
    prompts = [f"Prompt {number}" for number in range(20)]
    want = [answer.text for answer in chat.batch(prompts)]
    assert engine.num_running_peak == 20
    engine.num_running_peak = 0
    assert [answer.text for answer in await chat.abatch(prompts)] == want
    assert engine.num_running_peak == 20
    engine.num_running_peak = 0
    chain = ChatPromptTemplate.from_template("{x}") | chat | StrOutputParser()
    assert chain.batch([{"x": prompt} for prompt in prompts]) == want
    assert engine.num_running_peak == 20


async def test_max_concurrency(engine: FakeEngine, chat: ChatPagedLLM) -> None:
    engine.delay_s = 0.002
    prompts = [f"Prompt {number}" for number in range(7)]
    chat.batch(prompts, config={"max_concurrency": 3})
    assert engine.num_running_peak == 3
    await chat.abatch(prompts, config={"max_concurrency": 2})
    assert engine.num_running_peak == 3


@BOTH
def test_batch_as_completed(cls: Any, engine: FakeEngine) -> None:
    engine.delay_s = 0.002
    model = cls(engine=engine, temperature=0)
    prompts = [f"Prompt {number}" for number in range(12)]
    got = dict(model.batch_as_completed(prompts))
    assert engine.num_running_peak == 12
    assert [text_of(got[index]) for index in range(12)] == [text_of(model.invoke(prompt)) for prompt in prompts]


async def test_errors_stay_apart(engine: FakeEngine, chat: ChatPagedLLM) -> None:
    """Public case P7: [text, error, text]."""
    long = "long " * 2000
    for answers in (
        chat.batch(["Hi", long, "Hi"], return_exceptions=True),
        await chat.abatch(["Hi", long, "Hi"], return_exceptions=True),
    ):
        assert answers[0].text == answers[2].text
        assert isinstance(answers[1], ContextLengthError)
    engine.errors["bad"] = InvalidRequestError("bad prompt")
    with pytest.raises(InvalidRequestError):
        chat.batch(["Hi", "bad"])


@BOTH
def test_many_threads(cls: Any, engine: FakeEngine) -> None:
    """Row 16: two threads on one in-process engine used to mean KeyErrors and crashes."""
    engine.delay_s = 0.001
    model = cls(engine=engine, temperature=0)
    prompts = [f"Ticket {number}" for number in range(16)]
    solo = [text_of(model.invoke(prompt)) for prompt in prompts]
    with ThreadPoolExecutor(16) as pool:
        assert [text_of(answer) for answer in pool.map(model.invoke, prompts)] == solo


def test_a_huge_batch_takes_no_thread_per_input(engine: FakeEngine, chat: ChatPagedLLM) -> None:
    """A thousand threads would only wait: the engine runs max_num_seqs at a time."""
    engine.delay_s = 0.05
    assert len(chat.batch(["Hello"] * 80, max_tokens=4)) == 80
    # More than the 6 threads of LangChain's default on two cores; how many start in time is the machine's affair.
    assert 8 <= engine.num_running_peak <= 64
