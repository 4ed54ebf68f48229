"""Hints on a real engine: they reach the KV blocks, what they achieved comes back, and the text stays the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from conftest import TinyModel
from engine_helpers import request, run, wait_until_at_rest

from pagedllm.api import CacheHints, GenerateRequest, Message, Retain, SamplingParams
from pagedllm.errors import ConfigError, InvalidRequestError, QueueFullError, QueueTimeoutError
from pagedllm.local import LocalEngine

BLOCK_BYTES = 16 * 2 * 3 * 2 * 16 * 4  # block_size, keys and values, layers, KV heads, head_dim, float32


def hinted(prompt: Any, max_tokens: int = 4, **hints: Any) -> GenerateRequest:
    return dataclasses.replace(request(prompt, max_tokens), hints=CacheHints(**hints))


def prompt_of(length: int, offset: int = 0) -> list[int]:
    return [3 + (offset * 97 + i * 13) % 300 for i in range(length)]


def test_a_pinned_prefix_survives_a_flood(tiny_model: TinyModel):
    prompt = prompt_of(200)
    with tiny_model.engine(kv_cache_memory_bytes=40 * BLOCK_BYTES, max_model_len=512) as engine:
        plain = run(engine, hinted([*prompt, 5]))[0]
        pinned = run(engine, hinted([*prompt, 5], retain=[Retain(num_tokens=200, ttl_s=300)]))[0]
        assert pinned.text == plain.text
        (outcome,) = pinned.hints
        assert (outcome.hint, outcome.outcome, outcome.num_tokens) == ("retain", "accepted", 192)
        for i in range(50):
            run(engine, hinted(prompt_of(300, offset=i + 1), max_tokens=1))
        assert engine.match_prefix(request([*prompt, 6])) == 192
        stats = engine.stats()
        assert (stats.num_pins, stats.num_pinned_blocks) == (1, 12)
        assert ("retain", "accepted", 1) in stats.hint_outcomes
        released = run(engine, hinted([*prompt, 7], release=True))[0]
        assert [(item.hint, item.outcome) for item in released.hints] == [("release", "accepted")]
        for i in range(5):
            run(engine, hinted(prompt_of(300, offset=i + 60), max_tokens=1))
        assert engine.match_prefix(request([*prompt, 6])) == 0


def test_warm_computes_the_prompt_and_nothing_else(tiny_engine: LocalEngine):
    prompt = prompt_of(100)
    warmed = tiny_engine.warm(request(prompt, 50, n=3))
    assert (warmed.text, warmed.choices[0].finish_reason, len(warmed.choices)) == ("", "length", 1)
    assert (warmed.usage.prompt_tokens, warmed.usage.completion_tokens) == (100, 0)
    assert (warmed.usage.cached_tokens, warmed.usage.cache_creation_tokens) == (0, 96)
    assert [(item.hint, item.outcome, item.num_tokens) for item in warmed.hints] == [("warm", "accepted", 96)]
    used = run(tiny_engine, request(prompt, 4))[0]
    assert (used.usage.cached_tokens, used.usage.cache_creation_tokens) == (96, 0)


async def test_warm_async(tiny_engine: LocalEngine):
    warmed = await tiny_engine.awarm(request(prompt_of(100), 50))
    assert warmed.usage.cache_creation_tokens == 96


def test_warm_raises_what_a_request_would(tiny_engine: LocalEngine):
    with pytest.raises(InvalidRequestError, match="max_model_len"):
        tiny_engine.warm(request(prompt_of(100_000)))


def test_tokens_created_in_the_cache_are_counted_once(tiny_engine: LocalEngine):
    prompt = prompt_of(70)
    outputs = [run(tiny_engine, request(prompt, 4))[0], run(tiny_engine, request([*prompt, *prompt_of(70, 5)], 4))[0]]
    assert [item.usage.cache_creation_tokens for item in outputs] == [64, 128 - 64]


@pytest.mark.model
def test_a_place_in_a_chat_is_found_in_its_tokens(engine: LocalEngine):
    """A breakpoint after the documents must cover exactly what stays the same when the question changes."""
    document = "The mill by the river was built in 1804. " * 30
    chat = [
        Message(role="system", content="Answer from the document."),
        Message(role="user", content=document + "Question: who?"),
    ]
    places = [
        Retain(message_index=0, ttl_s=60),
        Retain(message_index=1, num_chars=len(document), ttl_s=60),
        Retain(ttl_s=60),
    ]
    engine.reset_prefix_cache()
    pinned = run(engine, hinted(chat, retain=places))[0]
    other = [chat[0], Message(role="user", content=document + "What is the year?")]
    num_shared = engine.match_prefix(request(other))
    tokens = [item.num_tokens for item in pinned.hints]
    assert [item.outcome for item in pinned.hints] == ["missing" if not tokens[0] else "accepted", *["accepted"] * 2]
    assert tokens[1] == num_shared
    assert tokens[2] == pinned.usage.prompt_tokens // 16 * 16
    run(engine, hinted(chat, release=True))
    assert engine.stats().num_pins == 0


@pytest.mark.parametrize(
    ("place", "match"),
    [
        ({"message_index": 1}, r"message_index=1.*1 messages"),
        ({"message_index": -1}, "message_index=-1"),
        ({"num_tokens": 0}, "num_tokens=0"),
        ({"num_tokens": 5, "message_index": 0}, "not both"),
        ({"num_chars": 5}, "give message_index"),
        ({"ttl_s": 0}, "ttl_s=0"),
        ({"ttl_s": float("nan")}, "ttl_s=nan"),
    ],
)
@pytest.mark.model
def test_a_wrong_place_is_an_error_that_names_it(engine: LocalEngine, place: dict[str, Any], match: str):
    with pytest.raises(InvalidRequestError, match=match):
        engine.stream(hinted([Message(role="user", content="hi")], retain=[Retain(**place)]))


def test_a_full_queue_refuses_and_harms_nobody(tiny_model: TinyModel):
    with tiny_model.engine(max_num_seqs=1, max_num_queued_reqs=2) as engine:
        results = engine.generate([request(prompt_of(20, i), 8, ignore_eos=True) for i in range(5)])
        assert [isinstance(result, QueueFullError) for result in results] == [False, False, True, True, True]
        assert engine.stats().num_refused == 3
        assert len(run(engine, request(prompt_of(20), 8))) == 1


def test_who_waits_too_long_is_told(tiny_model: TinyModel):
    with tiny_model.engine(max_num_seqs=1, queue_timeout_s=0.05) as engine:
        running = engine.stream(request(prompt_of(20), 400, ignore_eos=True))
        next(running)
        with pytest.raises(QueueTimeoutError, match=r"queue_timeout_s=0\.05"):
            list(engine.stream(request(prompt_of(20, 1), 4)))
        assert sum(len(chunk.token_ids) for chunk in running) == 399
        stats = wait_until_at_rest(engine)
        assert stats.num_timed_out == 1


def test_priorities_order_those_who_wait(tiny_model: TinyModel):
    priorities = [3, 1, 2, -5]
    with tiny_model.engine(max_num_seqs=1, scheduling_policy="priority") as engine:
        outputs = run(engine, *(hinted(prompt_of(20, 9), 4, priority=priority) for priority in priorities))
    waited = [output.timings.queue_s for output in outputs]
    assert [priority for _, priority in sorted(zip(waited, priorities, strict=True))] == [-5, 1, 2, 3]


def test_a_request_that_can_never_fit_is_refused_while_others_run(tiny_model: TinyModel):
    with tiny_model.engine(kv_cache_memory_bytes=10 * BLOCK_BYTES) as engine:
        running = engine.stream(request(prompt_of(20), 100, ignore_eos=True))
        next(running)
        (result,) = engine.generate([request(prompt_of(150), 50)])
        assert isinstance(result, InvalidRequestError)
        assert "160" in str(result)
        assert sum(len(chunk.token_ids) for chunk in running) == 99


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"swap_space": -1}, "swap_space=-1"),
        ({"swap_space": 1e6}, r"swap_space=1000000.0.*available"),
        ({"swap_space": 1e-6}, r"swap_space=1e-06.*at least one block"),
        ({"preemption_mode": "swap"}, "needs a swap_space"),
        ({"preemption_mode": "drop"}, "preemption_mode='drop'"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy='lifo'.*fcfs"),
        ({"max_itl_stretch": 1}, "max_itl_stretch=1"),
        ({"long_prefill_token_threshold": 0}, "long_prefill_token_threshold=0"),
        ({"max_num_queued_reqs": 0}, "max_num_queued_reqs=0"),
        ({"queue_timeout_s": 0}, "queue_timeout_s=0"),
        ({"max_pinned_fraction": 1.5}, "max_pinned_fraction=1.5"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_it(tiny_model: TinyModel, options: dict[str, Any], match: str):
    with pytest.raises(ConfigError, match=match):
        tiny_model.engine(**options)


def test_choices_store_the_prompt_once(tiny_model: TinyModel):
    prompt = prompt_of(100)
    peaks: dict[int, int] = {}
    for n in (1, 4):
        records: list[float] = []
        config = tiny_model.config(kv_cache_memory_bytes=100 * BLOCK_BYTES)
        with LocalEngine(config, on_step=lambda record, usage=records: usage.append(record.kv_cache_usage)) as engine:
            sampling = SamplingParams(max_tokens=8, n=n, temperature=1.0, seed=1, ignore_eos=True)
            output = run(engine, GenerateRequest(prompt=tuple(prompt), sampling=sampling))[0]
            assert len(output.choices) == n
            peaks[n] = round(max(records) * 100)
    assert peaks == {1: 7, 4: 6 + 4}
