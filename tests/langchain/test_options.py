"""Choices, log probabilities and the other sampling options, through both adapters, on a tiny model."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.exceptions import ModelInvalidRequestError
from langchain_core.messages import AIMessageChunk, HumanMessage

from langchain_pagedllm import ChatPagedLLM, PagedLLM
from pagedllm.local import LocalEngine

BOTH = pytest.mark.parametrize("cls", [ChatPagedLLM, PagedLLM])
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 12, "ignore_eos": True}


def infos(model: Any, prompt: str = "the cache", **options: Any) -> list[dict[str, Any]]:
    """What ``generate`` tells of each completion."""
    if isinstance(model, ChatPagedLLM):
        result = model.generate([[HumanMessage(prompt)]], **options)
    else:
        result = model.generate([prompt], **options)
    return [{"text": item.text, **(item.generation_info or {})} for item in result.generations[0]]


@BOTH
def test_all_choices_are_generated_and_invoke_gives_the_first(cls: Any, tiny_engine: LocalEngine):
    """Wrappers of other engines have returned one of n, or put the usage on each and so counted it n times."""
    model = cls(engine=tiny_engine, **SAMPLED)
    three = infos(model, n=3)
    assert len({item["text"] for item in three}) == 3
    first = model.invoke("the cache", n=3)
    assert (first if isinstance(first, str) else first.text) == three[0]["text"]
    result = model.generate(["the cache"] if cls is PagedLLM else [[HumanMessage("the cache")]], n=3)
    if cls is ChatPagedLLM:
        usages = [item.message.usage_metadata for item in result.generations[0]]
    else:
        usages = [item.generation_info.get("usage_metadata") for item in result.generations[0]]
    assert usages[0]["output_tokens"] == 36
    assert usages[1:] == [None, None]


@BOTH
async def test_a_stream_of_choices_is_refused(cls: Any, tiny_engine: LocalEngine):
    model = cls(engine=tiny_engine, n=2, **SAMPLED)
    with pytest.raises(ModelInvalidRequestError, match="n=2"):
        next(iter(model.stream("the cache")))
    with pytest.raises(ValueError, match="n=2"):
        await anext(aiter(model.astream("the cache")))


@BOTH
def test_logprobs_in_generate_and_stream(cls: Any, tiny_engine: LocalEngine):
    model = cls(engine=tiny_engine, logprobs=True, top_logprobs=2, **SAMPLED)
    [whole] = infos(model)
    content = whole["logprobs"]["content"]
    assert len(content) == 12
    assert all(item["logprob"] <= 0 and len(item["top_logprobs"]) == 2 for item in content)
    assert all(item["bytes"] is None or bytes(item["bytes"]).decode() == item["token"] for item in content)
    if cls is ChatPagedLLM:
        chunks = list(model.stream("the cache"))
        total = sum(chunks[1:], chunks[0])
        assert isinstance(total, AIMessageChunk)
        streamed = total.response_metadata["logprobs"]["content"]
        assert [item["token"] for item in streamed] == [item["token"] for item in content]
        # The second run reads a cached prefix, which may round otherwise.
        assert [item["logprob"] for item in streamed] == pytest.approx([item["logprob"] for item in content], abs=1e-4)
    assert "logprobs" not in infos(cls(engine=tiny_engine, **SAMPLED))[0]
    assert infos(cls(engine=tiny_engine, logprobs=3, **SAMPLED))[0]["logprobs"]["content"][0]["top_logprobs"][2]


def test_top_logprobs_needs_logprobs(tiny_engine: LocalEngine):
    with pytest.raises(ValueError, match="top_logprobs=2: needs logprobs=True"):
        ChatPagedLLM(engine=tiny_engine, top_logprobs=2)


@BOTH
@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {50: 100.0}},
        {"frequency_penalty": 2.0, "temperature": 0},
        {"presence_penalty": -2.0, "temperature": 0},
        {"repetition_penalty": 3.0, "temperature": 0},
        {"min_p": 1.0},
        {"ignore_eos": False, "logit_bias": {2: 100.0}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_reach_the_sampler(cls: Any, options: dict[str, Any], tiny_engine: LocalEngine):
    plain = cls(engine=tiny_engine, **SAMPLED)
    by_call = infos(plain, **options)[0]["text"]
    assert by_call != infos(plain)[0]["text"]
    assert infos(cls(engine=tiny_engine, **{**SAMPLED, **options}))[0]["text"] == by_call


@BOTH
def test_min_tokens_reaches_the_engine(cls: Any, tiny_engine: LocalEngine):
    ended = {**SAMPLED, "ignore_eos": False, "logit_bias": {2: 100.0}}
    lengths = [
        sum(1 for _ in infos(cls(engine=tiny_engine, logprobs=True, **ended), **options)[0]["logprobs"]["content"])
        for options in ({}, {"min_tokens": 7})
    ]
    assert lengths == [1, 8]
