"""Black-box cases that users of other engines have reported, on the embedded model (their numbers: P1 to P12)."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_helpers import assert_at_rest, ids, request, run

from pagedllm.api import RequestOutput
from pagedllm.local import LocalEngine

pytestmark = pytest.mark.model

ALPHABET = "Here is the English alphabet: ABC"


def stream_text(engine: LocalEngine, *args: object, **options: object) -> tuple[str, list[str], str | None]:
    """Joined text, deltas and finish reason of a stream."""
    chunks = list(engine.stream(request(*args, **options)))  # type: ignore[arg-type]
    deltas = [chunk.text for chunk in chunks]
    return "".join(deltas), deltas, chunks[-1].finish_reason


def test_p1_streams_really_stream(engine: LocalEngine):
    """Wrappers of other engines 'stream' one chunk at the end."""
    start = time.monotonic()
    arrivals = [
        time.monotonic() - start
        for chunk in engine.stream(request("Count: one, two, three,", 48, ignore_eos=True))
        if chunk.text
    ]
    assert len(arrivals) >= 10
    assert arrivals[0] < arrivals[-1] / 2


def test_p2_a_stop_string_split_over_tokens_never_leaks(engine: LocalEngine):
    whole = run(engine, request(ALPHABET, 48))[0].text
    start = next(i for i in range(4, len(whole)) if whole[i - 1].isalpha() and whole[i].isalpha())
    stop = whole[start : start + 9]
    cut = whole[: whole.index(stop)]
    output = run(engine, request(ALPHABET, 48, stop=[stop]))[0]
    text, deltas, reason = stream_text(engine, ALPHABET, 48, stop=[stop])
    assert output.text == text == cut
    assert output.choices[0].finish_reason == reason == "stop"
    assert output.choices[0].stop_reason == stop
    assert all(cut.startswith("".join(deltas[: i + 1])) for i in range(len(deltas)))
    assert output.usage.completion_tokens < 48
    text, _, _ = stream_text(engine, ALPHABET, 48, stop=["DEFGHIJ"])
    assert text == whole.partition("DEFGHIJ")[0]


@pytest.mark.parametrize("max_tokens", [*range(1, 13), 64])
def test_p4_characters_of_several_tokens_arrive_whole(max_tokens: int, engine: LocalEngine):
    prompt = "Copy: 😀😀😀😀😀😀😀😀 你好世界 你好世界 ďábel ďábel 😀😀😀😀"
    output = run(engine, request(prompt, max_tokens, ignore_eos=True))[0]
    text, deltas, _ = stream_text(engine, prompt, max_tokens, ignore_eos=True)
    assert text == output.text == engine.detokenize(output.choices[0].token_ids)
    assert output.usage.completion_tokens == max_tokens
    position = 0
    for delta in deltas:
        assert output.text[position : position + len(delta)] == delta
        position += len(delta)


def test_p9_the_cache_is_transparent(engine: LocalEngine):
    engine.reset_prefix_cache()

    def send() -> RequestOutput:
        return run(engine, request(ids(200, 1), 32))[0]

    outputs = [send(), send()]
    plain = run(engine, request(ids(100, 1) + ids(90, 7), 32))[0].text
    assert run(engine, request(ids(100, 1) + ids(90, 7), 32, stop=[plain[3:6]]))[0].choices[0].finish_reason == "stop"
    run(engine, request(ids(900, 3), 8))
    outputs += [send(), send()]
    assert len({output.text for output in outputs}) == 1
    assert [output.usage.cached_tokens for output in outputs] == [0, 192, 192, 192]
    assert {output.usage.prompt_tokens for output in outputs} == {200}


def test_p11_no_cross_talk(engine: LocalEngine):
    """Other engines have handed one client's text to another."""
    prompts = [f"Ticket K{k}-{k * 7919 % 10007}. Repeat the ticket: K{k}-" for k in range(12)]

    def ask(k: int) -> str:
        options = [{}, {"temperature": 0.8, "seed": k}, {"top_k": 5, "temperature": 1.0, "seed": k}][k % 3]
        return run(engine, request(prompts[k], 12, **options))[0].text

    alone = [ask(k) for k in range(12)]
    with ThreadPoolExecutor(12) as pool:
        for _ in range(3):
            assert list(pool.map(ask, range(12))) == alone


async def test_p12_who_leaves_stops_the_work(engine: LocalEngine):
    long = ids(20, 5)
    stream = engine.astream(request(long, 900, ignore_eos=True))
    for _ in range(3):
        await stream.__anext__()
    await stream.aclose()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(engine.agenerate([request(long, 900, ignore_eos=True)]), 0.5)
    deadline = time.monotonic() + 3
    while (stats := await engine.astats()).num_running or stats.num_waiting:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert_at_rest(stats)
    start = time.monotonic()
    await engine.agenerate([request("Hi", 2)])
    assert time.monotonic() - start < 3
