"""The openai client and langchain-openai against a server process with the real model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

pytestmark = [pytest.mark.slow, pytest.mark.model]

MODEL = "smollm2-135m"
MESSAGES: Any = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture
def base_url(serve: Callable[..., Any]) -> str:
    return f"{serve('--dtype', 'float32').url}/v1"


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as made:
        yield made


def test_openai(client: openai.OpenAI) -> None:
    """Chat, completions, streams, log probabilities, choices and errors, as one user would go through them."""
    options: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**options)
    text = whole.choices[0].message.content
    assert text
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

    scored = client.chat.completions.create(**options, logprobs=True, top_logprobs=3)
    assert scored.choices[0].logprobs is not None
    items = scored.choices[0].logprobs.content or []
    assert scored.usage is not None
    assert len(items) == scored.usage.completion_tokens
    assert all(item.logprob == max(top.logprob for top in item.top_logprobs) for item in items), "greedy"

    several = client.chat.completions.create(**options | {"temperature": 1, "seed": 7, "n": 3})
    again = client.chat.completions.create(**options | {"temperature": 1, "seed": 7, "n": 3})
    assert [c.message.content for c in several.choices] == [c.message.content for c in again.choices]

    completion = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=4, echo=True, logprobs=1)
    assert completion.choices[0].text.startswith("One, two,")
    assert completion.choices[0].logprobs is not None
    assert "".join(completion.choices[0].logprobs.tokens or []) == completion.choices[0].text

    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="word " * 20_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**options | {"model": "other"})
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**options, extra_body={"topk": 3})
    assert bad.value.param == "topk"


async def test_langchain_openai(base_url: str) -> None:
    """A chain over ChatOpenAI: invoke, stream, batch and their async twins give one text."""
    with httpx.Client() as sync_client:
        async with httpx.AsyncClient() as async_client:
            model = ChatOpenAI(
                **{"base_url": base_url, "api_key": "none", "model": MODEL, "temperature": 0, "max_tokens": 24},
                **{"http_client": sync_client, "http_async_client": async_client, "max_retries": 0},
            )
            chain = ChatPromptTemplate.from_template("Name three {things}.") | model | StrOutputParser()
            text = chain.invoke({"things": "colours"})
            assert text
            assert "".join(chain.stream({"things": "colours"})) == text
            assert chain.batch([{"things": "colours"}] * 3) == [text] * 3
            assert await chain.ainvoke({"things": "colours"}) == text
            assert "".join([piece async for piece in chain.astream({"things": "colours"})]) == text
            message = model.invoke("Name three colours.")
            assert message.usage_metadata is not None
            assert message.usage_metadata["input_token_details"]["cache_read"] > 0
            assert message.response_metadata["finish_reason"] in ("stop", "length")


class Person(BaseModel):
    """Somebody."""

    name: str
    born: int


@tool
def get_weather(location: str) -> str:
    """Get the weather at a location."""
    return f"Sunny in {location}."


def test_tools_and_structure(client: openai.OpenAI, base_url: str) -> None:
    """On a real model: a forced call, whole and streamed, and an answer of a schema, by both clients."""
    # Greedy, a model of this size repeats itself without end.
    sampling: Any = {"temperature": 0, "frequency_penalty": 1.0, "max_tokens": 160}
    with httpx.Client() as http_client:
        model = ChatOpenAI(base_url=base_url, api_key="none", model=MODEL, http_client=http_client, **sampling)
        bound = model.bind_tools([get_weather], tool_choice="any")
        message: Any = bound.invoke("What is the weather in Łódź?")
        [call] = message.tool_calls
        assert call["name"] == "get_weather"
        total: Any = None
        for piece in bound.stream("What is the weather in Łódź?"):
            total = piece if total is None else total + piece
        assert [item["args"] for item in total.tool_calls] == [call["args"]]
        for method in ("json_schema", "function_calling"):
            chain = model.with_structured_output(Person, method=method)
            assert isinstance(chain.invoke("Ada Lovelace was born in 1815."), Person)
    parsed = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Ada Lovelace was born in 1815."}],
        response_format=Person,
        **sampling,
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)
