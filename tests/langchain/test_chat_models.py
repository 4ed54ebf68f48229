"""The chat model's hooks: text, chunks, usage, metadata, callbacks, events."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from fake_engine import FakeEngine
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from langchain_pagedllm import ChatPagedLLM
from pagedllm.errors import InvalidRequestError


class Tokens(BaseCallbackHandler):
    """Remembers what callbacks were told, in the order of events that the test adds to as well."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_llm_new_token(self, token: Any, *, chunk: Any = None, **kwargs: Any) -> None:
        assert chunk is not None
        self.events.append(("token", token))

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.events.append(("end", response))

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        self.events.append(("error", error))


def added(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    return total


async def test_every_way_gives_the_same_text_and_usage(engine: FakeEngine, chat: ChatPagedLLM) -> None:
    messages = [SystemMessage("Be brief."), HumanMessage("Hello")]
    first = chat.invoke(messages)
    want = (first.content, first.usage_metadata, first.response_metadata["finish_reason"])
    answers = []
    for call in (
        lambda: chat.invoke(messages),
        lambda: added(list(chat.stream(messages))),
        lambda: chat.batch([messages])[0],
    ):
        engine.reset_prefix_cache()
        answers.append(call())
    engine.reset_prefix_cache()
    answers.append(await chat.ainvoke(messages))
    engine.reset_prefix_cache()
    answers.append(added([chunk async for chunk in chat.astream(messages)]))
    for answer in answers:
        assert (answer.content, answer.usage_metadata, answer.response_metadata["finish_reason"]) == want
        assert answer.response_metadata["model_name"] == "fake"
        assert answer.response_metadata["model_provider"] == "pagedllm"
        assert set(answer.response_metadata["timings"]) == {"queue_s", "ttft_s", "total_s"}
    assert engine.requests[0].messages is not None
    assert [message.role for message in engine.requests[0].messages] == ["system", "user"]


def test_cache_read_is_the_engines_prefix_hit(chat: ChatPagedLLM) -> None:
    prompt = "The same question, long enough for a few blocks."
    first, second = chat.invoke(prompt).usage_metadata, chat.invoke(prompt).usage_metadata
    assert first is not None
    assert second is not None
    assert first["input_token_details"] == {"cache_read": 0, "cache_creation": 0}
    assert 0 < second["input_token_details"]["cache_read"] < second["input_tokens"]
    salted = chat.invoke(prompt, cache_salt="tenant").usage_metadata
    assert salted is not None
    assert salted["input_token_details"] == {"cache_read": 0, "cache_creation": 0}


async def test_chunks(chat: ChatPagedLLM) -> None:
    """LangChain adds chunks up: a scalar sent twice doubles, and text beside the last position is lost in v3."""
    for chunks in (list(chat.stream("Hello")), [chunk async for chunk in chat.astream("Hello")]):
        *body, last = chunks
        assert len(body) > 5
        assert all(chunk.content and chunk.chunk_position is None and chunk.usage_metadata is None for chunk in body)
        assert all(chunk.response_metadata == {"model_provider": "pagedllm"} for chunk in body)
        assert (last.content, last.chunk_position) == ("", "last")
        assert last.usage_metadata is not None
        assert last.response_metadata["model_name"] == "fake"


def test_stream_usage_off(engine: FakeEngine, chat: ChatPagedLLM) -> None:
    for model in (ChatPagedLLM(engine=engine, stream_usage=False), chat.bind(stream_usage=False)):
        assert added(list(model.stream("Hello"))).usage_metadata is None


async def test_streams_really_stream() -> None:
    """Public case P1: a wrapper that collects first shows its only chunk at the very end."""
    chat = ChatPagedLLM(engine=FakeEngine(delay_s=0.01), temperature=0, max_tokens=48, ignore_eos=True)
    prompt = "Count: one, two, three,"
    started = time.perf_counter()
    times, text = [], ""
    for chunk in chat.stream(prompt):
        times.append(time.perf_counter() - started)
        text += chunk.text
    assert len(times) > 10
    assert times[0] < times[-1] / 2
    assert text == chat.invoke(prompt).text


async def test_callback_comes_before_the_chunk(chat: ChatPagedLLM) -> None:
    """Row 72: a token callback after the yield is one token late, or never comes when the consumer stops."""
    tokens = Tokens()
    for chunk in chat.stream("Hello", config={"callbacks": [tokens]}):
        assert tokens.events[-1] == ("token", chunk.content)
    assert tokens.events[-1][0] == "end"
    async for chunk in chat.astream("Hello", config={"callbacks": [tokens]}):
        assert tokens.events[-1] == ("token", chunk.content)
    assert tokens.events[-1][0] == "end"


async def test_hooks_call_back_when_given_a_run_manager(chat: ChatPagedLLM) -> None:
    """LangChain's event stream hands the run manager to the hook and does not call back itself."""

    class Manager:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_llm_new_token(self, token: str, *, chunk: Any) -> None:
            self.seen.append(chunk)

    class AsyncManager(Manager):
        async def on_llm_new_token(self, token: str, *, chunk: Any) -> None:  # type: ignore[override]
            self.seen.append(chunk)

    manager: Any = Manager()
    for piece in chat._stream([HumanMessage("Hello")], run_manager=manager):
        assert manager.seen[-1] is piece
    manager = AsyncManager()
    async for piece in chat._astream([HumanMessage("Hello")], run_manager=manager):
        assert manager.seen[-1] is piece


async def test_streaming_inside_invoke(engine: FakeEngine, chat: ChatPagedLLM) -> None:
    want = chat.invoke("Hello").content
    for model, told in (
        (ChatPagedLLM(engine=engine, temperature=0, streaming=True), True),
        (chat.bind(stream=True), True),
        (chat, False),
    ):
        tokens = Tokens()
        assert model.invoke("Hello", config={"callbacks": [tokens]}).content == want
        assert (await model.ainvoke("Hello", config={"callbacks": [tokens]})).content == want
        assert any(event[0] == "token" for event in tokens.events) is told


async def test_events_of_a_chain(chat: ChatPagedLLM) -> None:
    chain = ChatPromptTemplate.from_template("Say {word}") | chat | StrOutputParser()
    want = chain.invoke({"word": "x"})
    events = [event async for event in chain.astream_events({"word": "x"}, version="v2")]
    parts = [event["data"]["chunk"].content for event in events if event["event"] == "on_chat_model_stream"]
    assert len(parts) > 5
    assert "".join(parts) == want
    assert sum(event["event"] == "on_chat_model_end" for event in events) == 1


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
async def test_v3_events(chat: ChatPagedLLM) -> None:
    want = chat.invoke("Hello")
    stream = chat.stream_events("Hello", version="v3")
    assert stream.output.text == want.text
    assert stream.output.usage_metadata["output_tokens"] == want.usage_metadata["output_tokens"]  # type: ignore[index]
    astream = await chat.astream_events("Hello", version="v3")
    assert (await astream.output).text == want.text


async def test_output_version_v1(engine: FakeEngine) -> None:
    chat = ChatPagedLLM(engine=engine, temperature=0, output_version="v1")
    [block] = added(list(chat.stream("Hello"))).content
    assert block["type"] == "text"  # type: ignore[index]
    assert chat.invoke("Hello").content == [{"type": "text", "text": block["text"]}]  # type: ignore[index]


def test_usage_reaches_langchains_handler(chat: ChatPagedLLM) -> None:
    usage = UsageMetadataCallbackHandler()
    list(chat.stream("Hello", config={"callbacks": [usage]}))
    chat.invoke("Hello", config={"callbacks": [usage]})
    assert list(usage.usage_metadata) == ["fake"]
    assert usage.usage_metadata["fake"]["input_tokens"] == 2 * len("<user>Hello\n<assistant>")


async def test_stop(engine: FakeEngine, chat: ChatPagedLLM) -> None:
    """Public case P3: the constructor's stop must not give way to a call's None, and the call's value wins."""
    whole = chat.invoke("Hello").text
    stop = whole[9:14]
    want = whole[: whole.index(stop)]
    stopped = ChatPagedLLM(engine=engine, temperature=0, stop=stop)
    for model in (stopped, chat.bind(stop=[stop]), ChatPagedLLM(engine=engine, temperature=0, stop_sequences=[stop])):
        answers: list[Any] = [model.invoke("Hello"), await model.ainvoke("Hello"), *model.batch(["Hello"])]
        answers += [added(list(model.stream("Hello"))), added([chunk async for chunk in model.astream("Hello")])]
        for answer in answers:
            assert answer.text == want
            assert answer.response_metadata["finish_reason"] == "stop"
            assert answer.response_metadata["stop_reason"] == stop
    assert stopped.invoke("Hello", stop=["zzzz"]).text == whole
    assert stopped.invoke("Hello", stop=[]).text == whole
    assert added(list(stopped.stream("Hello", stop=["zzzz"]))).text == whole
    assert "stop_reason" not in stopped.invoke("Hello", stop=[]).response_metadata


def test_call_options_reach_the_engine(engine: FakeEngine) -> None:
    chat = ChatPagedLLM(engine=engine, temperature=0.3, max_tokens=7, cache_salt="a")
    chat.invoke("x", temperature=0, top_k=3, top_p=0.5, seed=9, ignore_eos=True, stop_token_ids=[5], cache_salt="b")
    sampling, hints = engine.requests[-1].sampling, engine.requests[-1].hints
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0, 3, 0.5, 9)
    assert (sampling.max_tokens, sampling.ignore_eos, sampling.stop_token_ids, hints.salt) == (7, True, (5,), "b")
    chat.invoke("x", temperature=None, max_completion_tokens=5)
    assert (engine.requests[-1].sampling.temperature, engine.requests[-1].sampling.max_tokens) == (0.3, 5)
    assert engine.requests[-1].hints.salt == "a"


def test_langchains_own_options_are_tolerated(chat: ChatPagedLLM) -> None:
    """Core passes these through; an error on them would break structured output and tracing."""
    options = {"ls_structured_output_format": {"kwargs": {}, "schema": {"title": "x", "type": "object"}}}
    assert chat.invoke("x", stream=False, **options).text == added(list(chat.stream("x", **options))).text


async def test_leaving_a_stream_aborts(engine: FakeEngine) -> None:
    """Rows 13 and 72, public case P12: what nobody reads must not go on burning the machine."""
    chat = ChatPagedLLM(engine=engine, ignore_eos=True, max_tokens=2000)
    for _ in chat.stream("Hello"):
        break
    assert engine.num_aborts == 1
    async for _ in chat.astream("Hello"):
        break
    for _ in range(100):
        await asyncio.sleep(0.01)
        if engine.num_aborts == 2:
            break
    assert engine.num_aborts == 2
    assert engine.stats().num_running == 0


async def test_closing_a_hook_aborts_at_once(engine: FakeEngine) -> None:
    """Left to the garbage collector, an async request runs until the event loop comes round to it, or for ever."""
    chat = ChatPagedLLM(engine=engine, ignore_eos=True, max_tokens=2000)
    stream: Any = chat._stream([HumanMessage("Hello")])
    next(stream)
    stream.close()
    assert engine.num_aborts == 1
    astream: Any = chat._astream([HumanMessage("Hello")])
    await anext(astream)
    await astream.aclose()
    assert engine.num_aborts == 2


async def test_cancelling_a_call_aborts(engine: FakeEngine) -> None:
    engine.delay_s = 0.01
    chat = ChatPagedLLM(engine=engine, ignore_eos=True, max_tokens=2000)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(chat.ainvoke("Hello"), 0.1)
    assert (engine.num_aborts, engine.stats().num_running) == (1, 0)


async def test_error_in_stream_reaches_callbacks(chat: ChatPagedLLM, engine: FakeEngine) -> None:
    engine.errors["bad"] = InvalidRequestError("bad prompt")
    tokens = Tokens()
    with pytest.raises(InvalidRequestError):
        list(chat.stream("bad", config={"callbacks": [tokens]}))
    with pytest.raises(InvalidRequestError):
        await chat.ainvoke("bad", config={"callbacks": [tokens]})
    assert [event[0] for event in tokens.events] == ["error", "error"]


async def test_async_callbacks(chat: ChatPagedLLM) -> None:
    class Handler(AsyncCallbackHandler):
        tokens: list[Any] = []  # noqa: RUF012

        async def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
            self.tokens.append(token)

    async for _ in chat.astream("Hello", config={"callbacks": [Handler()]}):
        pass
    assert len(Handler.tokens) > 5


def test_two_event_loops_in_a_row(chat: ChatPagedLLM) -> None:
    """Public case P15: a client bound to the first loop fails in the second with 'Event loop is closed'."""

    async def both() -> tuple[str, str]:
        streamed = "".join([chunk.text async for chunk in chat.astream("Hello")])
        return (await chat.ainvoke("Hello")).text, streamed

    assert asyncio.run(both()) == asyncio.run(both())


async def test_loop_stays_responsive(engine: FakeEngine) -> None:
    """Row 52: an ainvoke that blocks the loop stops every other task of the user."""
    engine.delay_s = 0.005
    chat = ChatPagedLLM(engine=engine, max_tokens=60, ignore_eos=True)
    calls = asyncio.gather(*(chat.ainvoke(f"Question {number}") for number in range(8)))
    worst = 0.0
    while not calls.done():
        before = time.perf_counter()
        await asyncio.sleep(0.01)
        worst = max(worst, time.perf_counter() - before)
    assert len(await calls) == 8
    assert engine.num_running_peak == 8
    assert worst < 0.5


def test_token_counts(engine: FakeEngine, chat: ChatPagedLLM) -> None:
    """Row 69: LangChain's default downloads GPT-2 and counts wrongly."""
    assert chat.get_token_ids("abc") == [97, 98, 99]
    assert chat.get_num_tokens("größe") == 5
    messages = [HumanMessage("Hello"), AIMessage("Hi"), HumanMessage("Bye")]
    answer = chat.invoke(messages)
    assert answer.usage_metadata is not None
    assert chat.get_num_tokens_from_messages(messages) == answer.usage_metadata["input_tokens"]
    assert chat.get_num_tokens_from_messages([]) == 0
    assert chat.get_num_tokens_from_messages(messages, tools=[]) == answer.usage_metadata["input_tokens"]
    assert ChatPagedLLM(engine=engine, custom_get_token_ids=lambda text: [1, 2]).get_num_tokens("x") == 2
