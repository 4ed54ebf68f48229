"""What LangChain's standard suite asks of chat models, asked of completion models, for which LangChain has none.

A class that inherits from ``CompletionModelSuite`` names the constructor's arguments in ``model_params``.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core import exceptions as core
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, get_buffer_string
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableLambda
from llm_suite_basics import PROMPT, AsyncRuns, CompletionModelBasics, Runs, info_of

from langchain_pagedllm import PagedLLM

PROMPTS = [f"{PROMPT} and the numbers {number}" for number in range(4)]
LONG_PROMPT = "the values of the tokens that came before " * 4


class CompletionModelSuite(CompletionModelBasics):
    """All of it; everything at temperature 0 and 12 tokens unless a test says otherwise."""

    # --- Answers ---

    async def test_every_way_gives_the_same_text(self, model: PagedLLM) -> None:
        want = model.invoke(PROMPT)
        assert len(want) > 0
        assert await model.ainvoke(PROMPT) == want
        assert "".join(model.stream(PROMPT)) == want
        assert "".join([text async for text in model.astream(PROMPT)]) == want
        assert model.batch([PROMPT]) == await model.abatch([PROMPT]) == [want]
        assert model.generate([PROMPT]).generations[0][0].text == want
        assert (await model.agenerate([PROMPT])).generations[0][0].text == want

    async def test_batches_keep_their_order(self, model: PagedLLM) -> None:
        want = [model.invoke(prompt) for prompt in PROMPTS]
        assert len(set(want)) > 1
        assert model.batch(PROMPTS) == await model.abatch(PROMPTS) == want
        assert model.batch(PROMPTS, config={"max_concurrency": 2}) == want
        assert dict(model.batch_as_completed(PROMPTS)) == dict(enumerate(want))
        assert {number: text async for number, text in model.abatch_as_completed(PROMPTS)} == dict(enumerate(want))

    async def test_streams_come_in_pieces(self, model: PagedLLM) -> None:
        """A text that arrives whole at the end is no stream."""
        for pieces in (list(model.stream(PROMPT)), [piece async for piece in model.astream(PROMPT)]):
            assert len(pieces) > 3
            assert all(isinstance(piece, str) for piece in pieces)

    def test_kinds_of_input(self, model: PagedLLM) -> None:
        messages = [SystemMessage("a block"), HumanMessage("is shared"), AIMessage("only"), HumanMessage("when full")]
        want = model.invoke(get_buffer_string(messages))
        assert model.invoke(messages) == model.invoke(ChatPromptTemplate.from_messages(messages).invoke({})) == want
        assert model.invoke(PromptTemplate.from_template("{x}").invoke({"x": PROMPT})) == model.invoke(PROMPT)

    async def test_in_a_chain(self, model: PagedLLM) -> None:
        chain = PromptTemplate.from_template("the cache {what}") | model | StrOutputParser()
        want = model.invoke("the cache holds the keys")
        given = {"what": "holds the keys"}
        assert chain.invoke(given) == await chain.ainvoke(given) == "".join(chain.stream(given)) == want
        assert chain.batch([given, given]) == [want, want]

    async def test_stop(self, model: PagedLLM) -> None:
        whole = self.build(max_tokens=24).invoke(PROMPT)
        stop = whole[6:9]
        want = whole[: whole.index(stop)]
        for stopped in (self.build(max_tokens=24, stop=[stop]), self.build(max_tokens=24).bind(stop=[stop])):
            assert stopped.invoke(PROMPT) == await stopped.ainvoke(PROMPT) == want
            assert "".join(stopped.stream(PROMPT)) == "".join([text async for text in stopped.astream(PROMPT)]) == want
            assert stopped.batch([PROMPT]) == [want]
        constructed = self.build(max_tokens=24, stop=[stop])
        assert constructed.invoke(PROMPT, stop=["nothing like it"]) == whole
        info = info_of(constructed.generate([PROMPT]).generations[0][0])
        assert (info["finish_reason"], info["stop_reason"]) == ("stop", stop)

    def test_length_is_told(self, model: PagedLLM) -> None:
        info = info_of(model.generate([PROMPT]).generations[0][0])
        assert info["finish_reason"] == "length"
        assert info["usage_metadata"]["output_tokens"] == 12

    def test_sampling_is_repeatable(self) -> None:
        model = self.build(temperature=1.0)
        assert (
            model.invoke(PROMPT, seed=5)
            == model.invoke(PROMPT, seed=5)
            == self.build(temperature=1.0, seed=5).invoke(PROMPT)
        )
        assert len({model.invoke(PROMPT, seed=seed) for seed in range(4)}) > 1

    def test_n(self, model: PagedLLM) -> None:
        [choices] = model.generate([PROMPT], n=3, temperature=1.0, seed=1).generations
        assert len({choice.text for choice in choices}) == 3
        assert info_of(choices[0])["usage_metadata"]["output_tokens"] == 36
        assert ["usage_metadata" in info_of(choice) for choice in choices] == [True, False, False]
        with pytest.raises(ValueError, match="n=3"):
            list(model.stream(PROMPT, n=3))

    def test_logprobs(self, model: PagedLLM) -> None:
        generation = model.generate([PROMPT], logprobs=True, top_logprobs=2).generations[0][0]
        content = info_of(generation)["logprobs"]["content"]
        assert len(content) == 12
        for item in content:
            assert item["logprob"] <= 0
            assert len(item["top_logprobs"]) == 2
            # Greedy: the token that was taken is the most probable one.
            assert item["top_logprobs"][0]["logprob"] == pytest.approx(item["logprob"], abs=1e-4)
        streamed = [
            item
            for chunk in model._stream(PROMPT, logprobs=True)
            for item in (chunk.generation_info or {}).get("logprobs", {}).get("content", [])
        ]
        assert [item["token"] for item in streamed] == [item["token"] for item in content]

    def test_model_override(self, model: PagedLLM) -> None:
        name = info_of(model.generate([PROMPT]).generations[0][0])["model_name"]
        assert info_of(model.generate([PROMPT], model=name).generations[0][0])["model_name"] == name
        with pytest.raises((core.ModelNotFoundError, core.ModelInvalidRequestError)):
            model.invoke(PROMPT, model="no-such-model")

    # --- Usage ---

    async def test_usage(self, model: PagedLLM) -> None:
        for result in (model.generate(PROMPTS), await model.agenerate(PROMPTS)):
            assert result.llm_output is not None
            usages = [info_of(choices[0])["usage_metadata"] for choices in result.generations]
            for usage in usages:
                assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
                assert usage["input_tokens"] >= sum(usage["input_token_details"].values())
            totals = result.llm_output["token_usage"]
            assert totals["completion_tokens"] == 12 * len(PROMPTS)
            assert totals["prompt_tokens"] == sum(usage["input_tokens"] for usage in usages)
            assert isinstance(result.llm_output["model_name"], str)

    async def test_usage_of_a_stream_comes_once(self, model: PagedLLM) -> None:
        want = info_of(model.generate([PROMPT]).generations[0][0])["usage_metadata"]["input_tokens"]
        for chunks in (list(model._stream(PROMPT)), [chunk async for chunk in model._astream(PROMPT)]):
            usages = [
                chunk.generation_info["usage_metadata"]
                for chunk in chunks
                if "usage_metadata" in (chunk.generation_info or {})
            ]
            assert [(usage["input_tokens"], usage["output_tokens"]) for usage in usages] == [(want, 12)]
            assert chunks[-1].generation_info is not None
            assert "usage_metadata" in chunks[-1].generation_info
        assert not any(
            "usage_metadata" in (chunk.generation_info or {}) for chunk in model._stream(PROMPT, stream_usage=False)
        )

    def test_cache_read(self) -> None:
        model = self.build(cache_salt=uuid.uuid4().hex)
        usages = [info_of(model.generate([LONG_PROMPT]).generations[0][0])["usage_metadata"] for _ in range(2)]
        cached = [usage["input_token_details"]["cache_read"] for usage in usages]
        assert cached[0] == 0
        assert 0 < cached[1] < usages[1]["input_tokens"]
        other = self.build(cache_salt=uuid.uuid4().hex).generate([LONG_PROMPT])
        assert info_of(other.generations[0][0])["usage_metadata"]["input_token_details"]["cache_read"] == 0

    async def test_warm_prefix(self) -> None:
        model = self.build(cache_salt=uuid.uuid4().hex)
        assert model.match_prefix(LONG_PROMPT) == 0
        warmed = await model.awarm_prefix(LONG_PROMPT)
        assert 0 < model.match_prefix(LONG_PROMPT) <= warmed.prompt_tokens
        assert model.cache_stats().prefix_queries > 0

    def test_token_counts(self, model: PagedLLM) -> None:
        info = info_of(model.generate([PROMPT]).generations[0][0])
        assert (
            model.get_num_tokens(PROMPT) == len(model.get_token_ids(PROMPT)) == info["usage_metadata"]["input_tokens"]
        )
        assert model.get_num_tokens_from_messages([HumanMessage(PROMPT)]) == model.get_num_tokens(f"Human: {PROMPT}")

    # --- Callbacks and events ---

    async def test_callbacks(self, model: PagedLLM) -> None:
        want = model.invoke(PROMPT)
        for stream in (True, False):
            runs, seen = Runs(), AsyncRuns()
            if stream:
                text = "".join(model.stream(PROMPT, config={"callbacks": [runs]}))
                other = "".join([piece async for piece in model.astream(PROMPT, config={"callbacks": [seen]})])
            else:
                text = model.invoke(PROMPT, config={"callbacks": [runs]})
                other = await model.ainvoke(PROMPT, config={"callbacks": [seen]})
            assert text == other == want
            assert runs.started == [PROMPT]
            assert "".join(runs.tokens) == "".join(seen.tokens) == (want if stream else "")
            assert [len(runs.results), len(seen.results), len(runs.errors)] == [1, 1, 0]
            assert runs.results[0].generations[0][0].text == want

    def test_callbacks_of_a_batch(self, model: PagedLLM) -> None:
        runs = Runs()
        want = model.batch(PROMPTS, config={"callbacks": [runs]})
        assert sorted(runs.started) == sorted(PROMPTS)
        assert sorted(result.generations[0][0].text for result in runs.results) == sorted(want)

    def test_callbacks_hear_of_errors(self, model: PagedLLM) -> None:
        runs = Runs()
        for call in (model.invoke, lambda prompt, **options: list(model.stream(prompt, **options))):
            with pytest.raises(ValueError, match="temperature=-1"):
                call(PROMPT, temperature=-1, config={"callbacks": [runs]})
        assert len(runs.errors) == 2
        assert not runs.results

    async def test_events(self, model: PagedLLM) -> None:
        want = model.invoke(PROMPT)

        async def step(text: str) -> str:
            return await model.ainvoke(text)

        for runnable in (model, RunnableLambda(step)):
            events = [event async for event in runnable.astream_events(PROMPT, version="v2")]
            of_model = [event for event in events if event["event"].startswith("on_llm")]
            assert [of_model[0]["event"], of_model[-1]["event"]] == ["on_llm_start", "on_llm_end"]
            chunks = [event["data"]["chunk"] for event in of_model if event["event"] == "on_llm_stream"]
            assert len(chunks) > 3
            assert "".join(getattr(chunk, "text", chunk) for chunk in chunks) == want

    # --- Around the model ---

    async def test_response_cache(self) -> None:
        runs = Runs()
        model = self.build(cache=InMemoryCache(), callbacks=[runs])
        first = model.invoke(PROMPT)
        before = model.cache_stats().num_steps
        assert model.invoke(PROMPT) == await model.ainvoke(PROMPT) == first
        assert model.cache_stats().num_steps == before
        # Another option is another answer.
        assert model.invoke(PROMPT, max_tokens=3) != first
        assert model.cache_stats().num_steps > before

    def test_configurable_fields(self, model: PagedLLM) -> None:
        configurable = model.configurable_fields(max_tokens=ConfigurableField(id="length"))
        short = configurable.with_config(configurable={"length": 3})
        assert short.invoke(PROMPT) == "".join(short.stream(PROMPT)) == model.invoke(PROMPT, max_tokens=3)
        assert configurable.invoke(PROMPT) == model.invoke(PROMPT)

    async def test_fallbacks(self, model: PagedLLM) -> None:
        broken = self.build(max_tokens=100_000)  # can never fit
        safe = broken.with_fallbacks([model])
        want = model.invoke(PROMPT)
        assert safe.invoke(PROMPT) == await safe.ainvoke(PROMPT) == "".join(safe.stream(PROMPT)) == want
        assert safe.batch([PROMPT, PROMPT]) == [want, want]

    def test_retry(self, model: PagedLLM) -> None:
        """An error that another try cannot mend must not be tried again, one that it can mend must."""
        calls: list[int] = []

        def flaky(prompt: str) -> str:
            calls.append(1)
            return model.invoke(prompt, **({"temperature": -1} if len(calls) < 3 else {}))

        retried = RunnableLambda(flaky).with_retry(
            retry_if_exception_type=(core.ModelInvalidRequestError,), wait_exponential_jitter=False
        )
        assert retried.invoke(PROMPT) == model.invoke(PROMPT)
        assert len(calls) == 3
        with pytest.raises(core.ModelInvalidRequestError) as caught:
            model.invoke(PROMPT, temperature=-1)
        assert not caught.value.is_retryable

    # --- Errors ---

    @pytest.mark.parametrize("way", ["invoke", "stream", "ainvoke", "astream", "batch", "abatch"])
    async def test_errors(self, way: str, model: PagedLLM) -> None:
        """The same error of the same class, whichever way it comes."""
        cases: list[tuple[str, dict[str, Any], type[Exception], str]] = [
            (PROMPT, {"max_tokens": 100_000}, core.ContextOverflowError, "100000|100,000"),
            ("the cache " * 4000, {}, core.ContextOverflowError, "max_model_len"),
            (PROMPT, {"top_p": 0}, core.ModelInvalidRequestError, "top_p=0"),
            (PROMPT, {"max_tokenz": 3}, core.ModelInvalidRequestError, "max_tokenz"),
            (PROMPT, {"stop": [""]}, core.ModelInvalidRequestError, "stop"),
        ]
        for prompt, options, kind, message in cases:
            with pytest.raises(kind, match=message):
                await self._call(model, way, prompt, options)
        assert len(model.invoke(PROMPT)) > 0

    async def _call(self, model: PagedLLM, way: str, prompt: str, options: dict[str, Any]) -> Any:
        calls: dict[str, Callable[[], Any]] = {
            "invoke": lambda: model.invoke(prompt, **options),
            "stream": lambda: list(model.stream(prompt, **options)),
            "batch": lambda: model.batch([PROMPT, prompt], **options),
        }
        if way in calls:
            return calls[way]()
        if way == "ainvoke":
            return await model.ainvoke(prompt, **options)
        if way == "abatch":
            return await model.abatch([PROMPT, prompt], **options)
        return [piece async for piece in model.astream(prompt, **options)]

    async def test_errors_of_a_batch_stay_apart(self, model: PagedLLM) -> None:
        prompts = [PROMPTS[0], "the cache " * 4000, PROMPTS[1]]
        want = [model.invoke(PROMPTS[0]), model.invoke(PROMPTS[1])]
        for answers in (
            model.batch(prompts, return_exceptions=True),
            await model.abatch(prompts, return_exceptions=True),
        ):
            assert [answers[0], answers[2]] == want
            assert isinstance(answers[1], core.ContextOverflowError)

    # --- Ending early, and many at once ---

    async def test_leaving_a_stream_ends_it(self) -> None:
        model = self.build(max_tokens=300)
        for number, _ in enumerate(model.stream(PROMPT)):
            if number == 2:
                break
        await self._idle(model)
        stream = model.astream(PROMPT)
        await anext(stream)
        await stream.aclose()
        await self._idle(model)
        assert len(model.invoke(PROMPT, max_tokens=2)) > 0

    async def _idle(self, model: PagedLLM) -> None:
        deadline = time.monotonic() + 60
        while (stats := await model.acache_stats()).num_running or stats.num_waiting:
            assert time.monotonic() < deadline, stats
            await asyncio.sleep(0.01)

    def test_threads(self, model: PagedLLM) -> None:
        want = [model.invoke(prompt) for prompt in PROMPTS]
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            assert list(pool.map(model.invoke, PROMPTS)) == want

    def test_event_loops(self, model: PagedLLM) -> None:
        """A client that belongs to the first loop fails in the second."""
        want = model.invoke(PROMPT)
        assert [asyncio.run(model.ainvoke(PROMPT)) for _ in range(2)] == [want, want]
