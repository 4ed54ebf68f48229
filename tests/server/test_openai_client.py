"""The real openai client against the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_engine import FakeEngine
from server_helpers import Running, serving

from pagedllm.errors import EngineDeadError, QueueFullError

MESSAGES: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=8, temperature=0)
    choice = answer.choices[0]
    assert (choice.message.role, len(choice.message.content or ""), choice.finish_reason) == ("assistant", 8, "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, n=3, max_tokens=8, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    texts = {0: "", 1: "", 2: ""}
    stream = client.chat.completions.create(model="fake", messages=MESSAGES, n=3, max_tokens=8, seed=1, stream=True)
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(texts.values()) == [choice.message.content for choice in answer.choices]


def test_stream(client: openai.OpenAI) -> None:
    """One id, the role once, finish_reason last, the usage at the end."""
    whole = client.chat.completions.create(model="fake", messages=MESSAGES, max_completion_tokens=20)
    chunks = list(
        client.chat.completions.create(
            model="fake",
            messages=MESSAGES,
            max_completion_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *texts, last, usage = chunks
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].delta.role for chunk in [*texts, last]] == ["assistant"] + [None] * len(texts)
    assert [chunk.choices[0].finish_reason for chunk in texts] == [None] * len(texts)
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert "".join(chunk.choices[0].delta.content or "" for chunk in texts) == whole.choices[0].message.content
    assert usage.choices == []
    assert usage.usage is not None
    assert whole.usage is not None
    assert usage.usage.completion_tokens == whole.usage.completion_tokens


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert len(content) == 3
    assert "".join(item.token for item in content) == answer.choices[0].message.content
    assert all(len(item.top_logprobs) == 2 and item.bytes == list(item.token.encode()) for item in content)
    completion = client.completions.create(model="fake", prompt="Hello", max_tokens=3, logprobs=2)
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == completion.choices[0].text
    assert logprobs.text_offset == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(client: openai.OpenAI, stream: bool) -> None:
    """Evaluation tools score prompts this way; offsets must be places in the text that is sent."""
    answer: Any = client.completions.create(
        model="fake", prompt="Hello", max_tokens=6, logprobs=1, echo=True, stream=stream
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    text = "".join(choice.text for choice in choices)
    parts = [choice.logprobs for choice in choices if choice.logprobs is not None]
    tokens = [token for part in parts for token in part.tokens]
    offsets = [offset for part in parts for offset in part.text_offset]
    logprobs = [item for part in parts for item in part.token_logprobs]
    assert text.startswith("Hello")
    assert "".join(tokens) == text
    assert [text[at : at + len(token)] for at, token in zip(offsets, tokens, strict=True)] == tokens
    assert logprobs[0] is None
    assert None not in logprobs[1:]


def test_completions_of_many_prompts(client: openai.OpenAI) -> None:
    one = [client.completions.create(model="fake", prompt=p, max_tokens=9).choices[0].text for p in ("a", "b")]
    both = client.completions.create(model="fake", prompt=["a", "b"], max_tokens=9)
    assert [choice.text for choice in both.choices] == one
    assert [choice.index for choice in both.choices] == [0, 1]
    texts = ["", ""]
    for chunk in client.completions.create(model="fake", prompt=["a", "b"], max_tokens=9, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == one
    ids = client.completions.create(model="fake", prompt=[[97], [98]], max_tokens=9)
    assert [choice.text for choice in ids.choices] == one


def test_extensions(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        max_tokens=4,
        extra_body={
            **{"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "return_token_ids": True},
            **{"cache_salt": "s", "priority": 2, "request_id": "mine", "prompt_cache_key": "k"},
            "cache_hints": {"retain": [{"ttl_s": "5m"}]},
        },
    )
    assert answer.id == "chatcmpl-mine"
    extra: Any = answer.model_extra
    (record,) = extra["pagedllm"]["requests"]
    assert record["request_id"] == "mine"
    assert [item["hint"] for item in record["hints"]] == ["retain", "priority"]
    token_ids = (answer.choices[0].model_extra or {})["token_ids"]
    assert "".join(map(chr, token_ids)) == answer.choices[0].message.content


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]


def test_request_errors(client: openai.OpenAI) -> None:
    """Each error must be of the client's class for it, and say which field."""
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="fake", messages=MESSAGES, top_p=3)
    assert bad.value.param == "top_p"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="fake", prompt="a" * 5000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="fake", messages=MESSAGES, n=0, stream=True)


def test_engine_errors() -> None:
    """Before the first token an error is a status, later an event; neither tells what went on inside."""
    engine = FakeEngine(
        errors={"full": QueueFullError("secret"), "fault": RuntimeError("secret")},  # type: ignore[dict-item]
        late_errors={"late": EngineDeadError("secret")},
    )
    with serving(engine) as running, openai.OpenAI(base_url=running.v1, api_key="none", max_retries=0) as client:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as full:
                client.completions.create(model="fake", prompt="full", stream=stream)
            assert (full.value.status_code, full.value.code) == (503, "queue_full")
            assert int(full.value.response.headers["retry-after"]) >= 1
            with pytest.raises(openai.InternalServerError) as fault:
                client.completions.create(model="fake", prompt="fault", stream=stream)
            assert fault.value.status_code == 500
            assert "secret" not in fault.value.response.text
        stream_of_one = client.completions.create(model="fake", prompt="late", stream=True)
        assert next(stream_of_one).choices[0].text
        with pytest.raises(openai.APIError) as late:
            next(stream_of_one)
        assert late.value.code == "engine_dead"
        assert "secret" not in str(late.value)


async def test_async(server: Running) -> None:
    async with openai.AsyncOpenAI(base_url=server.v1, api_key="none") as client:
        whole = await client.chat.completions.create(model="fake", messages=MESSAGES)
        stream = await client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == whole.choices[0].message.content
