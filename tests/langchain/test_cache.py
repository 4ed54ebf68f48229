"""LangChain's response cache: public case P13."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import FakeEngine
from langchain_core.caches import InMemoryCache

from langchain_pagedllm import ChatPagedLLM, PagedLLM

BOTH = pytest.mark.parametrize("cls", [ChatPagedLLM, PagedLLM])

# Each call differs from the others in what may change its text.
CALLS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({}, {"max_tokens": 1}),
    ({}, {"max_tokens": 16}),
    ({"temperature": 1.0}, {"seed": 1}),
    ({"temperature": 1.0}, {"seed": 2}),
    ({"temperature": 0.5}, {}),
    ({"stop": ["a"]}, {}),
    ({"stop": ["b"]}, {}),
    ({}, {"stop": ["c"]}),
    ({}, {"ignore_eos": True, "max_tokens": 90}),
    ({"cache_salt": "tenant"}, {}),
]


@BOTH
async def test_different_calls_have_different_entries(cls: Any) -> None:
    """Rows 17 and 18: LangChain leaves a completion's call options out of the key and replays the wrong text."""
    for use_async in (False, True):
        cache, engine = InMemoryCache(), FakeEngine()
        for _ in range(2):
            for fields, options in CALLS:
                model = cls(engine=engine, cache=cache, **fields)
                answer = await model.ainvoke("Hello", **options) if use_async else model.invoke("Hello", **options)
                fresh = cls(engine=FakeEngine(), cache=False, **fields).invoke("Hello", **options)
                assert getattr(answer, "content", answer) == getattr(fresh, "content", fresh)
        # The second round was answered by the cache alone.
        assert len(engine.requests) == len(CALLS)


@BOTH
def test_models_do_not_share_entries(cls: Any) -> None:
    cache = InMemoryCache()
    engines = [FakeEngine(model="a"), FakeEngine(model="b")]
    for engine in engines * 2:
        cls(engine=engine, cache=cache).invoke("Hello")
    assert [len(engine.requests) for engine in engines] == [1, 1]


def test_same_options_hit_whether_bound_or_constructed(engine: FakeEngine) -> None:
    cache = InMemoryCache()
    PagedLLM(engine=engine, cache=cache, max_tokens=5).invoke("Hello")
    PagedLLM(engine=engine, cache=cache).bind(max_tokens=5).invoke("Hello")
    PagedLLM(engine=engine, cache=cache).invoke("Hello", max_completion_tokens=5, timeout=60)
    assert len(engine.requests) == 1


def test_batch_asks_only_for_what_is_missing(engine: FakeEngine) -> None:
    llm = PagedLLM(engine=engine, cache=InMemoryCache(), temperature=0)
    one = llm.invoke("One")
    assert llm.batch(["One", "Two"])[0] == one
    assert engine.batches == [1, 1]
