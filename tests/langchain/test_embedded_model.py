"""The public cases over the embedded model, for both adapters: the same list as LangChain's suite, and more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import ContextOverflowError, ModelInvalidRequestError, ModelTimeoutError
from langchain_core.messages import HumanMessage

from langchain_pagedllm import ChatPagedLLM, PagedLLM
from pagedllm.registry import shared_engine

pytestmark = pytest.mark.model

BOTH = pytest.mark.parametrize("cls", [ChatPagedLLM, PagedLLM])

# The engine of these is the one that the other tests of the embedded model share.
PARAMS: dict[str, Any] = {
    "model": "smollm2-135m",
    "temperature": 0,
    "max_tokens": 16,
    "engine_args": {"dtype": "float32"},
}
EMOJI = "Copy: 😀😀😀😀😀😀😀😀 你好世界 你好世界 ďábel ďábel 😀😀😀😀"


def text_of(answer: Any) -> str:
    return answer if isinstance(answer, str) else answer.text


def joined(chunks: Iterator[Any]) -> str:
    return "".join(map(text_of, chunks))


async def ajoined(chunks: Any) -> str:
    return "".join([text_of(chunk) async for chunk in chunks])


def engine_of(model: Any) -> Any:
    return shared_engine(model._engine_config())


async def wait_until_idle(model: Any, within_s: float) -> None:
    deadline = time.perf_counter() + within_s
    while (stats := engine_of(model).stats()).num_running or stats.num_waiting:
        assert time.perf_counter() < deadline, stats
        await asyncio.sleep(0.02)


class Order(BaseCallbackHandler):
    """Notes each token callback."""

    def __init__(self) -> None:
        self.tokens: list[str] = []

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.tokens.append(token)


@BOTH
async def test_p1_streams_really_stream(cls: Any) -> None:
    model = cls(**{**PARAMS, "max_tokens": 24, "ignore_eos": True})
    prompt = "Count: one, two, three,"
    whole = text_of(model.invoke(prompt))
    order, started = Order(), time.perf_counter()
    times, text = [], ""
    for chunk in model.stream(prompt, config={"callbacks": [order]}):
        assert order.tokens[-1] == text_of(chunk)
        if text_of(chunk):
            times.append(time.perf_counter() - started)
        text += text_of(chunk)
    assert len(times) >= 10
    assert times[0] < times[-1] / 2
    assert text == whole
    assert await ajoined(model.astream(prompt)) == whole
    kinds = ("on_chat_model_stream", "on_llm_stream")
    chunks = [event["data"]["chunk"] async for event in model.astream_events(prompt) if event["event"] in kinds]
    assert joined(iter(chunks)) == whole


@BOTH
async def test_p2_p3_stop(cls: Any) -> None:
    prompt = "Here is the English alphabet: ABC"
    plain = cls(**{**PARAMS, "max_tokens": 24})
    whole = text_of(plain.invoke(prompt))
    stop = whole[5:13]
    want = whole[: whole.index(stop)]
    for model in (cls(**{**PARAMS, "max_tokens": 24, "stop": [stop]}), plain.bind(stop=[stop])):
        texts = [
            text_of(model.invoke(prompt)),
            text_of(await model.ainvoke(prompt)),
            *map(text_of, model.batch([prompt])),
        ]
        texts += [joined(model.stream(prompt)), await ajoined(model.astream(prompt))]
        assert texts == [want] * 5
    constructed = cls(**{**PARAMS, "max_tokens": 24, "stop": [stop]})
    assert (
        text_of(constructed.invoke(prompt, stop=["zzzz"])) == joined(constructed.stream(prompt, stop=["zzzz"])) == whole
    )


@BOTH
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 32])
def test_p4_multi_byte(cls: Any, max_tokens: int) -> None:
    model = cls(**{**PARAMS, "max_tokens": max_tokens, "ignore_eos": True})
    whole = text_of(model.invoke(EMOJI))
    deltas = [text_of(chunk) for chunk in model.stream(EMOJI)]
    assert "".join(deltas) == whole
    assert sum(delta.count("\ufffd") for delta in deltas) == whole.count("\ufffd")


@BOTH
async def test_p7_context_overflow(cls: Any) -> None:
    model = cls(**PARAMS)
    too_long = "word " * 8500
    for call in (model.invoke, lambda text: list(model.stream(text))):
        with pytest.raises(ContextOverflowError, match="8192"):
            call(too_long)
    with pytest.raises(ContextOverflowError, match="8192"):
        await model.ainvoke(too_long)
    with pytest.raises(ContextOverflowError):
        model.invoke("word " * 900, max_tokens=8000)
    for answers in (
        model.batch(["Hi", too_long, "Hi"], return_exceptions=True),
        await model.abatch(["Hi", too_long, "Hi"], return_exceptions=True),
    ):
        assert text_of(answers[0]) == text_of(answers[2]) == text_of(model.invoke("Hi"))
        assert isinstance(answers[1], ContextOverflowError)


def test_p8_bad_values_stay_local() -> None:
    model = PagedLLM(**{**PARAMS, "max_tokens": 24, "ignore_eos": True})
    whole = model.invoke("The weather today")
    text = ""
    for number, chunk in enumerate(model.stream("The weather today")):
        text += chunk
        if number == 3:
            for bad in ({"stop_token_ids": [999999]}, {"top_p": 0}, {"top_p": 1.5}, {"temperature": -1}):
                with pytest.raises(ModelInvalidRequestError):
                    model.invoke("x", **bad)
            assert model.invoke("The weather today", temperature=1e-12) == whole
    assert text == whole


@BOTH
def test_p9_cache_is_transparent(cls: Any) -> None:
    model = cls(**{**PARAMS, "cache_salt": f"p9-{cls.__name__}"})
    prompt = "A long prompt about many things that repeats itself. " * 6
    results = [model.generate([[HumanMessage(prompt)]] if cls is ChatPagedLLM else [prompt]) for _ in range(3)]
    generations = [result.generations[0][0] for result in results]
    usages = [
        generation.message.usage_metadata if cls is ChatPagedLLM else generation.generation_info["usage_metadata"]
        for generation in generations
    ]
    assert len({generation.text for generation in generations}) == 1
    cached = [usage["input_token_details"]["cache_read"] for usage in usages]
    assert cached[0] == 0
    assert 0 < cached[1] == cached[2] < usages[0]["input_tokens"]


@BOTH
async def test_p12_cancel(cls: Any) -> None:
    model = cls(**{**PARAMS, "max_tokens": 900, "ignore_eos": True})
    model.invoke("Hello", max_tokens=1)
    for number, _ in enumerate(model.stream("Hello")):
        if number == 2:
            break
    await wait_until_idle(model, 3)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(model.ainvoke("Hello"), 0.3)
    await wait_until_idle(model, 3)
    async for _ in model.astream("Hello"):
        break
    await wait_until_idle(model, 3)
    for call in (model.invoke, lambda text, timeout: list(model.stream(text, timeout=timeout))):
        with pytest.raises(ModelTimeoutError):
            call("Hello", timeout=0.2)
    with pytest.raises(ModelTimeoutError):
        await model.ainvoke("Hello", timeout=0.2)
    await wait_until_idle(model, 3)


@BOTH
async def test_p13_cache_key(cls: Any) -> None:
    model = cls(**PARAMS, cache=InMemoryCache())
    short, longer = text_of(model.invoke("Once", max_tokens=1)), text_of(await model.ainvoke("Once", max_tokens=16))
    assert len(short) < len(longer)
    steps = engine_of(model).stats().num_steps
    assert text_of(await model.ainvoke("Once", max_tokens=1)) == short
    assert engine_of(model).stats().num_steps == steps


@BOTH
async def test_p11_p15_concurrency(cls: Any) -> None:
    model = cls(**{**PARAMS, "max_tokens": 8})
    prompts = [f"Ticket K{number}. Repeat the ticket: K{number}-" for number in range(8)]
    solo = [text_of(model.invoke(prompt)) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert list(map(text_of, pool.map(model.invoke, prompts))) == solo
    assert list(map(text_of, model.batch(prompts))) == solo
    assert engine_of(model).stats().num_running_peak >= 4
    calls = asyncio.gather(*map(model.ainvoke, prompts))
    worst = 0.0
    while not calls.done():
        before = time.perf_counter()
        await asyncio.sleep(0.05)
        worst = max(worst, time.perf_counter() - before)
    assert list(map(text_of, await calls)) == solo
    assert worst < 1.05


@BOTH
def test_p15_two_event_loops(cls: Any) -> None:
    model = cls(**{**PARAMS, "max_tokens": 8})
    assert text_of(asyncio.run(model.ainvoke("Hi"))) == asyncio.run(ajoined(model.astream("Hi")))


def test_token_counts_are_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    chat, llm = ChatPagedLLM(**PARAMS), PagedLLM(**PARAMS)
    answer = chat.invoke("Hello there")
    assert answer.usage_metadata is not None
    assert chat.get_num_tokens_from_messages([HumanMessage("Hello there")]) == answer.usage_metadata["input_tokens"]
    info = llm.generate(["Hello there"]).generations[0][0].generation_info
    assert info is not None
    assert llm.get_num_tokens("Hello there") == info["usage_metadata"]["input_tokens"]


def test_both_adapters_share_one_engine() -> None:
    assert engine_of(ChatPagedLLM(**PARAMS)) is engine_of(PagedLLM(**PARAMS))
