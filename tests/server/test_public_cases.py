"""What users of other servers reported, on the real model over HTTP. Names are those of the collected cases."""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from engine_helpers import ids, wait_until_at_rest
from langchain_openai import ChatOpenAI
from server_helpers import Running, events, joined, wait_until

from pagedllm.api import Engine

pytestmark = pytest.mark.model

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 32}
ALPHABET = "Here is the English alphabet: ABC"


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def cached_tokens(response: httpx.Response) -> int:
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def assert_alive(smollm: Running) -> None:
    assert smollm.complete("Hi", max_tokens=2).status_code == 200


def chat_model(smollm: Running, **options: Any) -> ChatOpenAI:
    defaults = {"temperature": 0, "max_retries": 0, "timeout": 60}
    return ChatOpenAI(base_url=smollm.v1, api_key="none", model="smollm2-135m", **defaults | options)


def test_p1_streams_really_stream(smollm: Running, smollm_engine: Engine) -> None:
    """An answer that comes in one piece at the end is no stream: the first text must come while the engine computes."""
    model = chat_model(smollm, max_tokens=48, extra_body={"ignore_eos": True})
    stream = model.stream("Count: one, two, three,")
    pieces = []
    running = None
    for chunk in stream:
        if running is None and chunk.content:
            running = smollm_engine.stats().num_running
        pieces.append(chunk.content)
    assert running == 1
    assert len([piece for piece in pieces if piece]) >= 10
    assert "".join(pieces) == model.invoke("Count: one, two, three,").content


async def test_p1_astream(smollm: Running) -> None:
    async with httpx.AsyncClient() as client:  # langchain-openai's own outlives the event loop
        model = chat_model(smollm, max_tokens=12, http_async_client=client)
        pieces = [chunk.content async for chunk in model.astream("Say hi.")]
        assert "".join(pieces) == (await model.ainvoke("Say hi.")).content


def test_p2_split_stop_string(smollm: Running) -> None:
    """A stop string of several tokens must not leak in parts, streamed or not."""
    body = GREEDY | {"max_tokens": 48}
    whole = text_of(smollm.complete(ALPHABET, **body))
    stop = whole[5:13]
    expected = whole[: whole.index(stop)]
    answer = smollm.complete(ALPHABET, stop=[stop], **body)
    assert text_of(answer) == expected
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    assert answer.json()["choices"][0]["stop_reason"] == stop
    seen = ""
    for event in events(smollm.complete(ALPHABET, stop=[stop], stream=True, **body)):
        seen += event["choices"][0]["text"]
        assert expected.startswith(seen)
    assert seen == expected


def test_p3_stop_from_langchain(smollm: Running) -> None:
    """A stop of the constructor must reach the engine, and one of the call replaces it."""
    question = "Count from one to ten."
    whole = chat_model(smollm, max_tokens=32).invoke(question).content
    stop = whole[4:10]
    expected = whole[: whole.index(stop)]
    stopping = chat_model(smollm, max_tokens=32, stop_sequences=[stop])
    assert stopping.invoke(question).content == expected
    assert "".join(chunk.content for chunk in stopping.stream(question)) == expected
    assert [item.content for item in stopping.batch([question])] == [expected]
    assert stopping.invoke(question, stop=["zzzz"]).content == whole
    assert chat_model(smollm, max_tokens=32).bind(stop=[stop]).invoke(question).content == expected


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 8, 12, 64])
def test_p4_multi_byte_streaming(smollm: Running, max_tokens: int) -> None:
    """Half a character must not be sent as U+FFFD and corrected later, because a delta cannot be taken back."""
    prompt = "Copy: 😀😀😀😀😀😀😀😀 你好世界 你好世界 ďábel ďábel 😀😀😀😀"
    body = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    whole = smollm.complete(prompt, **body)
    assert whole.json()["usage"]["completion_tokens"] == max_tokens
    streamed = joined(events(smollm.complete(prompt, stream=True, **body)))
    assert streamed == text_of(whole)


def test_p5_usage_once(smollm: Running) -> None:
    """Usage told twice is billed twice, and usage in a chunk of its own confuses those who did not ask for it."""
    expected = smollm.chat("Say hi.", **GREEDY).json()["usage"]
    plain = events(smollm.chat("Say hi.", stream=True, **GREEDY))
    assert all("usage" not in event and event["choices"] for event in plain)
    asked = events(smollm.chat("Say hi.", stream=True, stream_options={"include_usage": True}, **GREEDY))
    assert [place for place, event in enumerate(asked) if not event["choices"]] == [len(asked) - 1]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert asked[-1]["usage"][name] == expected[name]
    options = {"include_usage": True, "continuous_usage_stats": True}
    continuous = events(smollm.chat("Say hi.", stream=True, stream_options=options, **GREEDY))
    assert all(event["usage"]["prompt_tokens"] == expected["prompt_tokens"] for event in continuous)
    assert continuous[-1]["usage"]["completion_tokens"] == expected["completion_tokens"]
    model = chat_model(smollm, max_tokens=8, stream_usage=True)
    total = None
    for chunk in model.stream("Say hi."):
        total = chunk if total is None else total + chunk
    assert total is not None
    whole = model.invoke("Say hi.")
    assert total.usage_metadata is not None
    assert whole.usage_metadata is not None
    assert total.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"]
    assert total.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]


@pytest.mark.parametrize(
    "body",
    [
        *({"prompt": ""}, {"prompt": [""]}, {"prompt": []}, {"prompt": "a", "max_tokens": -1}, {"prompt": [50_000]}),
        *({"prompt": "a", "max_tokens": 0}, {"prompt": [-1]}, {"prompt": [[]]}),
    ],
)
def test_p6_degenerate_input(smollm: Running, body: dict[str, Any]) -> None:
    """Empty and impossible requests hung or killed engines."""
    answer = smollm.client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert smollm.client.post("/v1/chat/completions", json={"messages": []}).status_code == 400
    assert_alive(smollm)


def test_p7_context_overflow(smollm: Running) -> None:
    """The caller must be told by how much, and an error must not spoil the rest."""
    answer = smollm.complete(ids(1025))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "1024" in error["message"]
    assert "1025" in error["message"]
    answer = smollm.complete(ids(1000), max_tokens=100)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    streamed = smollm.complete(ids(1025), stream=True)
    assert streamed.status_code == 400, "before the first token an error is a status"
    assert_alive(smollm)


def test_p8_bad_sampling_values_stay_local(smollm: Running) -> None:
    """One request's bad value must not reach another's text."""
    body = {"temperature": 0, "max_tokens": 64, "ignore_eos": True}
    alone = text_of(smollm.complete(ALPHABET, **body))
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(smollm.complete, ALPHABET, **body)
        for bad in (
            *({"logit_bias": {"999999": 5}}, {"stop_token_ids": [999_999]}, {"top_p": 0}, {"top_p": 1.5}),
            {"temperature": -1},
        ):
            assert smollm.complete("a", **bad).status_code == 400
        assert text_of(beside.result()) == alone
    tiny = smollm.complete(ALPHABET, **body | {"temperature": 1e-12})
    assert text_of(tiny) == alone


def test_p9_cache_is_transparent(smollm: Running) -> None:
    """A hit must change figures and times, never the text."""
    smollm.client.post("/v1/cache/reset", json={})
    answers = []
    for number in range(4):
        if number == 2:
            other = ids(100, 1) + ids(90, 7)
            stop = text_of(smollm.complete(other, **GREEDY))[:4]
            smollm.complete(other, stop=[stop], **GREEDY)
            smollm.complete(ids(900, 3), **GREEDY)
        answers.append(smollm.complete(ids(200, 1), **GREEDY))
    assert len({text_of(answer) for answer in answers}) == 1
    hits = [cached_tokens(answer) for answer in answers]
    assert hits[0] == 0
    assert all(0 < hit <= 199 for hit in hits[1:])
    assert {answer.json()["usage"]["prompt_tokens"] for answer in answers} == {200}


def test_p10_salt(smollm: Running) -> None:
    """A salt that is ignored shares what should be apart; a cache that is off would pass for a salt."""
    smollm.client.post("/v1/cache/reset", json={})
    salts = [{"cache_salt": "A"}, {"cache_salt": "A"}, {"cache_salt": "B"}, {}, {"cache_salt": "A"}]
    answers = [smollm.complete(ids(160, 2), **GREEDY, **salt) for salt in salts]
    assert [cached_tokens(answer) > 0 for answer in answers] == [False, True, False, False, True]
    assert len({text_of(answer) for answer in answers}) == 1


def test_p11_no_cross_talk(smollm: Running) -> None:
    """Requests side by side with different options must not see each other."""
    nonces = [uuid.uuid4().hex[:6] for _ in range(12)]
    options: list[dict[str, Any]] = [{"repetition_penalty": 1.2}, {"logprobs": 2}, {}]
    calls = [
        {
            "prompt": f"Ticket K{k}-{nonce}. Repeat the ticket: K{k}-",
            "temperature": 0,
            "max_tokens": 12,
            **options[k % 3],
        }
        for k, nonce in enumerate(nonces)
    ]

    def ask(body: dict[str, Any]) -> tuple[str, str]:
        answer = smollm.client.post("/v1/completions", json=body)
        return text_of(answer), answer.json()["id"]

    alone = [ask(body)[0] for body in calls]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, calls))
    assert [text for text, _ in together] == alone
    assert len({name for _, name in together}) == 12
    for place, (text, _) in enumerate(together):
        assert not any(nonce in text for other, nonce in enumerate(nonces) if other != place)


def test_p12_cancel(smollm: Running, smollm_engine: Engine) -> None:
    """Work for clients that have left is work taken from others: streamed, not streamed, in LangChain."""
    wait_until_at_rest(smollm_engine)
    body = {"prompt": "Count:", "max_tokens": 900, "ignore_eos": True, "temperature": 0}
    with smollm.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        for _, _ in zip(range(3), response.iter_lines(), strict=False):
            pass
    wait_until_at_rest(smollm_engine)
    with pytest.raises(httpx.ReadTimeout):
        smollm.client.post("/v1/completions", json=body, timeout=0.5)
    wait_until_at_rest(smollm_engine)
    stream = chat_model(smollm, max_tokens=900, extra_body={"ignore_eos": True}).stream("Count.")
    next(stream)
    stream.close()
    wait_until_at_rest(smollm_engine)
    asyncio.run(_cancelled_ainvoke(smollm))
    wait_until_at_rest(smollm_engine)
    assert_alive(smollm)


async def _cancelled_ainvoke(smollm: Running) -> None:
    async with httpx.AsyncClient() as client:
        body = {"ignore_eos": True}
        model = chat_model(smollm, max_tokens=900, extra_body=body, http_async_client=client)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(model.ainvoke("Count."), 1)


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "user", "content": "4?"}, {"role": "assistant"}, {"role": "user", "content": "5?"}],
        [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
        [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}, {"role": "user", "content": "c"}],
        [
            {"role": "user", "content": "4?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "content": "4", "tool_call_id": "c"},
        ],
    ],
)
def test_p14_message_shapes(smollm: Running, turns: list[Any]) -> None:
    """Histories of real programs have turns without text, with calls, and in unusual orders."""
    answer = smollm.client.post("/v1/chat/completions", json={"messages": turns, "max_tokens": 2})
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["message"]
        assert "tool" in json.dumps(turns), "only what the template does not know may be refused"


def test_p14_parts_are_the_same_as_text(smollm: Running) -> None:
    plain = smollm.chat("hi", max_tokens=2).json()["usage"]["prompt_tokens"]
    parts = smollm.chat([{"type": "text", "text": "hi"}], max_tokens=2).json()["usage"]["prompt_tokens"]
    assert parts == plain
    assert smollm.chat(None, max_tokens=2).json()["usage"] == smollm.chat("", max_tokens=2).json()["usage"]
    assert smollm.chat([{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]).status_code == 400


def test_p15_concurrency(smollm: Running, smollm_engine: Engine) -> None:
    """Clients in many threads get their own answers, from steps that they share."""
    prompts = [f"Write a word that begins with {chr(65 + k)}:" for k in range(16)]
    alone = [text_of(smollm.complete(prompt, **GREEDY)) for prompt in prompts]
    barrier = threading.Barrier(16)

    def ask(prompt: str) -> str:
        barrier.wait()
        return text_of(smollm.complete(prompt, **GREEDY))

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, prompts))
    assert together == alone
    wait_until(lambda: smollm_engine.stats().num_running == 0)
    assert smollm_engine.stats().num_running_peak >= 4
