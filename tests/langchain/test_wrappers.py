"""What LangChain and LangGraph wrap around models: fallbacks, retries, caches, events, token streams of graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FakeEngine
from langchain.agents import create_agent
from langchain_core import exceptions as core
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessageChunk
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langgraph.graph import END, START, MessagesState, StateGraph
from served_engine import served

from langchain_pagedllm import ChatPagedLLM, PagedLLM
from pagedllm.errors import EngineError, InvalidRequestError, PagedLLMError, QueueFullError

BOTH = pytest.mark.parametrize("cls", [ChatPagedLLM, PagedLLM])
FAST: dict[str, Any] = {"wait_exponential_jitter": False, "exponential_jitter_params": {"initial": 0.001, "max": 0.001}}


def text_of(answer: Any) -> str:
    return answer if isinstance(answer, str) else answer.text


class RecoveringEngine(FakeEngine):
    """Refuses its first requests."""

    def __init__(self, num_refused: int, error: PagedLLMError) -> None:
        super().__init__()
        self.num_refused, self.error, self.num_tries = num_refused, error, 0

    def _start(self, request: Any) -> Any:
        self.num_tries += 1
        if self.num_tries <= self.num_refused:
            raise self.error
        return super()._start(request)


# --- Fallbacks and retries ---


@BOTH
async def test_fallbacks(cls: Any) -> None:
    """A stream falls back too, as long as nothing of it has been seen."""
    other = cls(engine=FakeEngine(model="other"), temperature=0)
    want = text_of(other.invoke("Hello"))
    broken = FakeEngine(errors={"Hello": EngineError("broken")})
    safe = cls(engine=broken, temperature=0).with_fallbacks([other])
    assert text_of(safe.invoke("Hello")) == text_of(await safe.ainvoke("Hello")) == want
    assert "".join(map(text_of, safe.stream("Hello"))) == want
    assert "".join([text_of(piece) async for piece in safe.astream("Hello")]) == want
    assert list(map(text_of, safe.batch(["Hello", "Hello"]))) == [want, want]
    assert list(map(text_of, await safe.abatch(["Hello", "Hello"]))) == [want, want]


@BOTH
def test_fallback_by_kind_of_error(cls: Any) -> None:
    """A longer context for prompts that overflow, and nothing else."""
    short = cls(engine=FakeEngine(max_model_len=64), temperature=0, max_tokens=8)
    wide = cls(engine=FakeEngine(), temperature=0, max_tokens=8)
    safe = short.with_fallbacks([wide], exceptions_to_handle=(core.ContextOverflowError,))
    assert text_of(safe.invoke("x" * 100)) == text_of(wide.invoke("x" * 100))
    with pytest.raises(core.ModelInvalidRequestError, match="top_p=0"):
        safe.invoke("x", top_p=0)


@BOTH
async def test_retries(cls: Any) -> None:
    want = text_of(cls(engine=FakeEngine(), temperature=0).invoke("Hello"))
    for use_async in (False, True):
        engine = RecoveringEngine(2, QueueFullError("full"))
        retried = cls(engine=engine, temperature=0).with_retry(
            retry_if_exception_type=(core.ModelAPIError,), stop_after_attempt=3, **FAST
        )
        answer = await retried.ainvoke("Hello") if use_async else retried.invoke("Hello")
        assert text_of(answer) == want
        assert engine.num_tries == 3


@BOTH
def test_what_no_retry_can_mend_is_tried_once(cls: Any) -> None:
    engine = RecoveringEngine(9, InvalidRequestError("bad prompt"))
    retried = cls(engine=engine, temperature=0).with_retry(
        retry_if_exception_type=(core.ModelRateLimitError, core.ModelAPIError), stop_after_attempt=3, **FAST
    )
    with pytest.raises(core.ModelInvalidRequestError, match="bad prompt"):
        retried.invoke("Hello")
    assert engine.num_tries == 1


@BOTH
def test_retries_and_fallbacks_of_a_chain(cls: Any) -> None:
    engine = RecoveringEngine(1, QueueFullError("full"))
    chain = ChatPromptTemplate.from_template("Say {word}") | cls(engine=engine, temperature=0) | StrOutputParser()
    want = (ChatPromptTemplate.from_template("Say {word}") | cls(engine=FakeEngine(), temperature=0)).invoke(
        {"word": "x"}
    )
    assert chain.with_retry(**FAST).invoke({"word": "x"}) == text_of(want)


# --- The response cache, as an application sets it for all its models ---


@pytest.fixture
def _global_cache() -> Iterator[None]:
    set_llm_cache(InMemoryCache())
    yield
    set_llm_cache(None)


@pytest.mark.usefixtures("_global_cache")
@BOTH
async def test_global_cache(cls: Any, engine: FakeEngine) -> None:
    model = cls(engine=engine, temperature=0)
    first = model.invoke("Hello")
    assert text_of(await model.ainvoke("Hello")) == text_of(first)
    assert len(engine.requests) == 1
    assert text_of(cls(engine=engine, temperature=0, cache=False).invoke("Hello")) == text_of(first)
    assert len(engine.requests) == 2
    # A stream is never answered from it.
    assert "".join(map(text_of, model.stream("Hello"))) == text_of(first)
    assert len(engine.requests) == 3


# --- Event streams ---


async def test_events_v2_name_the_steps(chat: ChatPagedLLM) -> None:
    chain = ChatPromptTemplate.from_template("Say {word}") | chat.with_config(tags=["mine"]) | StrOutputParser()
    events = [event async for event in chain.astream_events({"word": "x"}, version="v2", include_tags=["mine"])]
    assert {event["event"] for event in events} == {
        "on_chat_model_start",
        "on_chat_model_stream",
        "on_chat_model_end",
    }
    end = events[-1]["data"]["output"]
    assert end.usage_metadata["output_tokens"] > 0
    assert end.response_metadata["finish_reason"] == "stop"


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
async def test_events_v3_add_up(chat: ChatPagedLLM) -> None:
    """Deltas, usage and the end, each once, sync and async."""
    want = chat.invoke("Hello")
    stream = chat.stream_events("Hello", version="v3")
    assert "".join(stream.text) == want.text
    for message in (stream.output, await (await chat.astream_events("Hello", version="v3")).output):
        assert message.text == want.text
        assert message.usage_metadata == want.usage_metadata or message.usage_metadata["output_tokens"] > 0
        assert message.response_metadata["finish_reason"] == "stop"
    kinds = [event["event"] for event in chat.stream_events("Hello", version="v3")]
    assert [kinds[0], kinds[-1]] == ["message-start", "message-finish"]
    assert kinds.count("content-block-start") == kinds.count("content-block-finish") == 1
    assert kinds.count("content-block-delta") > 3


# --- LangGraph ---


def graph_of(model: ChatPagedLLM, way: str) -> Any:
    """A graph of one node that calls a model without streaming it."""

    def answer(state: MessagesState) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    async def aanswer(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    builder: Any = StateGraph(MessagesState)
    builder.add_node("answer", RunnableLambda(answer, aanswer) if way == "both" else answer)
    builder.add_edge(START, "answer")
    builder.add_edge("answer", END)
    return builder.compile()


def check_tokens(pieces: list[Any], want: str) -> None:
    chunks = [chunk for chunk, metadata in pieces if metadata["langgraph_node"] in ("answer", "model")]
    assert all(isinstance(chunk, AIMessageChunk) for chunk in chunks)
    assert len(chunks) > 5
    assert "".join(chunk.text for chunk in chunks) == want
    assert len({chunk.id for chunk in chunks}) == 1
    # Usage comes once, so that what adds chunks up does not count it twice.
    assert sum(chunk.usage_metadata is not None for chunk in chunks) == 1


@pytest.mark.parametrize("backend", ["local", "remote"])
async def test_langgraph_streams_tokens_of_an_invoke(backend: str, engine: FakeEngine) -> None:
    """A node that invokes is streamed by its graph, without knowing of it."""
    with served(engine) as url:
        model = ChatPagedLLM(temperature=0, **({"engine": engine} if backend == "local" else {"base_url": url}))
        want = model.invoke("Hello").text
        graph = graph_of(model, "both")
        asked: Any = {"messages": [{"role": "user", "content": "Hello"}]}
        check_tokens(list(graph.stream(asked, stream_mode="messages")), want)
        check_tokens([piece async for piece in graph.astream(asked, stream_mode="messages")], want)
        # The state has the whole message all the same.
        assert graph.invoke(asked)["messages"][-1].text == want


def test_agent_streams_tokens(chat: ChatPagedLLM) -> None:
    agent: Any = create_agent(chat)
    want = chat.invoke("Hello").text
    check_tokens(list(agent.stream({"messages": [("user", "Hello")]}, stream_mode="messages")), want)


def test_streaming_false_keeps_graphs_quiet(engine: FakeEngine) -> None:
    graph = graph_of(ChatPagedLLM(engine=engine, temperature=0, streaming=False), "sync")
    pieces = list(graph.stream({"messages": [("user", "Hello")]}, stream_mode="messages"))
    assert len(pieces) == 1
