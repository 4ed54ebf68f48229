"""The completion model's hooks: text, chunks, usage, callbacks, events."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_engine import FakeEngine
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage, get_buffer_string
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableLambda

from langchain_pagedllm import PagedLLM
from pagedllm.errors import InvalidRequestError


class Runs(BaseCallbackHandler):
    """What each run was told."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.ends: dict[str, Any] = {}
        self.errors: dict[str, BaseException] = {}
        self.prompts: dict[Any, str] = {}

    def on_llm_start(self, serialized: Any, prompts: list[str], *, run_id: Any, **kwargs: Any) -> None:
        self.prompts[run_id] = prompts[0]

    def on_llm_new_token(self, token: Any, *, chunk: Any = None, **kwargs: Any) -> None:
        assert chunk is not None
        self.tokens.append(token)

    def on_llm_end(self, response: Any, *, run_id: Any, **kwargs: Any) -> None:
        self.ends[self.prompts[run_id]] = response

    def on_llm_error(self, error: BaseException, *, run_id: Any, **kwargs: Any) -> None:
        self.errors[self.prompts[run_id]] = error


async def test_every_way_gives_the_same_text(llm: PagedLLM) -> None:
    want = llm.invoke("Once")
    assert "".join(llm.stream("Once")) == want
    assert await llm.ainvoke("Once") == want
    assert "".join([text async for text in llm.astream("Once")]) == want
    assert llm.batch(["Once", "Once"]) == await llm.abatch(["Once", "Once"]) == [want, want]
    assert (PromptTemplate.from_template("{x}") | llm).invoke({"x": "Once"}) == want


async def test_generate_tells_usage(engine: FakeEngine, llm: PagedLLM) -> None:
    """LangChain's tracer reads no usage from completions, so the result itself must carry it."""
    for result in (llm.generate(["One", "Three"]), await llm.agenerate(["One", "Three"])):
        infos = [generations[0].generation_info for generations in result.generations]
        assert [info["usage_metadata"]["input_tokens"] for info in infos if info] == [3, 5]
        for info in infos:
            assert info is not None
            assert (info["model_name"], info["model_provider"], info["finish_reason"]) == ("fake", "pagedllm", "stop")
        assert result.llm_output is not None
        usage = result.llm_output["token_usage"]
        assert usage["prompt_tokens"] == 8
        assert usage["total_tokens"] == 8 + usage["completion_tokens"]
    assert engine.batches == [2, 2]


async def test_stream_ends_with_usage_once(llm: PagedLLM) -> None:
    for chunks in (list(llm._stream("Once")), [chunk async for chunk in llm._astream("Once")]):
        *body, last = chunks
        assert len(body) > 5
        assert all(chunk.text and chunk.generation_info is None for chunk in body)
        assert last.text == ""
        assert last.generation_info is not None
        assert last.generation_info["usage_metadata"]["input_tokens"] == 4
    [*_, last] = llm._stream("Once", stream_usage=False)
    assert "usage_metadata" not in (last.generation_info or {})


async def test_callback_comes_before_the_chunk(llm: PagedLLM) -> None:
    runs = Runs()
    for text in llm.stream("Once", config={"callbacks": [runs]}):
        assert runs.tokens[-1] == text
    async for text in llm.astream("Once", config={"callbacks": [runs]}):
        assert runs.tokens[-1] == text
    assert runs.ends["Once"].generations[0][0].generation_info["usage_metadata"]["input_tokens"] == 4


async def test_streaming_inside_invoke(engine: FakeEngine, llm: PagedLLM) -> None:
    want = llm.invoke("Once")
    for model, told in (
        (PagedLLM(engine=engine, temperature=0, streaming=True), True),
        (llm.bind(stream=True), True),
        (llm, False),
    ):
        runs = Runs()
        assert model.invoke("Once", config={"callbacks": [runs]}) == want
        assert await model.ainvoke("Once", config={"callbacks": [runs]}) == want
        assert bool(runs.tokens) is told
        assert runs.ends["Once"].llm_output["token_usage"]["prompt_tokens"] == 4


async def test_events(engine: FakeEngine, llm: PagedLLM) -> None:
    """LangChain never streams a completion for its event handlers by itself."""
    want = llm.invoke("Once")

    async def chain(text: str) -> str:
        return await llm.ainvoke(text)

    for runnable in (llm, RunnableLambda(chain)):
        events = [event async for event in runnable.astream_events("Once", version="v2")]
        chunks = [event["data"]["chunk"] for event in events if event["event"] == "on_llm_stream"]
        parts = [getattr(chunk, "text", chunk) for chunk in chunks]
        assert len(parts) > 5
        assert "".join(parts) == want
    never = PagedLLM(engine=engine, temperature=0, streaming=False)

    async def quiet(text: str) -> str:
        return await never.ainvoke(text)

    events = [event async for event in RunnableLambda(quiet).astream_events("Once", version="v2")]
    assert not [event for event in events if event["event"] == "on_llm_stream"]


async def test_stop(engine: FakeEngine, llm: PagedLLM) -> None:
    """Public case P3."""
    whole = llm.invoke("Once")
    stop = whole[9:14]
    want = whole[: whole.index(stop)]
    stopped = PagedLLM(engine=engine, temperature=0, stop=[stop])
    for model in (stopped, llm.bind(stop=[stop])):
        assert model.invoke("Once") == await model.ainvoke("Once") == "".join(model.stream("Once")) == want
        assert model.batch(["Once"]) == await model.abatch(["Once"]) == [want]
    assert stopped.invoke("Once", stop=["zzzz"]) == "".join(stopped.stream("Once", stop=["zzzz"])) == whole
    info = stopped.generate(["Once"]).generations[0][0].generation_info
    assert info is not None
    assert info["stop_reason"] == stop


async def test_leaving_a_stream_aborts(engine: FakeEngine) -> None:
    llm = PagedLLM(engine=engine, ignore_eos=True, max_tokens=2000)
    for _ in llm.stream("Hello"):
        break
    async for _ in llm.astream("Hello"):
        break
    for _ in range(100):
        await asyncio.sleep(0.01)
        if engine.num_aborts == 2:
            break
    assert (engine.num_aborts, engine.stats().num_running) == (2, 0)


async def test_one_call_of_the_engine_per_batch(engine: FakeEngine, llm: PagedLLM) -> None:
    """Row 51: a batch that runs its prompts one by one has no use for continuous batching."""
    prompts = [f"Prompt {number}" for number in range(8)]
    solo = [llm.invoke(prompt) for prompt in prompts]
    engine.batches.clear()
    runs = Runs()
    assert llm.batch(prompts, config={"callbacks": [runs]}) == solo
    assert await llm.abatch(prompts, config={"max_concurrency": 8}) == solo
    assert engine.batches == [8, 8]
    assert set(runs.ends) == set(prompts)


async def test_errors_of_a_batch_stay_apart(engine: FakeEngine, llm: PagedLLM) -> None:
    """Row 50: one bad prompt must not fail the others, nor tell their runs of an error."""
    engine.delay_s = 0.005
    engine.errors["bad"] = InvalidRequestError("bad prompt")
    prompts = ["Hi", "bad", "Ho", "", "He"]
    want = [llm.invoke("Hi"), llm.invoke("Ho"), llm.invoke("He")]
    for return_async in (False, True):
        runs = Runs()
        config: Any = {"callbacks": [runs]}
        if return_async:
            answers = await llm.abatch(prompts, config, return_exceptions=True)
        else:
            answers = llm.batch(prompts, config, return_exceptions=True)
        assert [answers[0], answers[2], answers[4]] == want
        assert isinstance(answers[1], InvalidRequestError)
        assert isinstance(answers[3], InvalidRequestError)
        assert set(runs.ends) == {"Hi", "Ho", "He"}
        assert set(runs.errors) == {"bad", ""}
    assert engine.num_running_peak == 3
    with pytest.raises(InvalidRequestError, match="bad prompt"):
        llm.batch(["Hi", "bad"])


async def test_max_concurrency_is_a_sliding_window(engine: FakeEngine, llm: PagedLLM) -> None:
    """LangChain's default for completions waits for a whole group before it starts the next."""
    prompts = [f"Prompt {number}" for number in range(7)]
    want = llm.batch(prompts)
    engine.delay_s, engine.num_running_peak = 0.002, 0
    assert llm.batch(prompts, config={"max_concurrency": 3}) == want
    assert engine.num_running_peak == 3
    engine.num_running_peak = 0
    assert await llm.abatch(prompts, config={"max_concurrency": 3}) == want
    assert engine.num_running_peak == 3
    assert llm.batch([]) == await llm.abatch([]) == []


def test_token_counts(llm: PagedLLM) -> None:
    assert llm.get_token_ids("abc") == [97, 98, 99]
    messages = [HumanMessage("Hello")]
    assert llm.get_num_tokens_from_messages(messages) == len(get_buffer_string(messages))
    assert llm.get_num_tokens_from_messages([]) == 0
    with pytest.raises(InvalidRequestError, match="tools"):
        llm.get_num_tokens_from_messages(messages, tools=[{"name": "f"}])
