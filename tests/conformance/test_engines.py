"""What every engine must do alike, wherever it runs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import uuid
from typing import Any

import pytest
from conftest import TinyModel
from engine_helpers import output_of, request, wait_until_at_rest

from pagedllm.api import (
    CacheHints,
    Chunk,
    Engine,
    GenerateRequest,
    Message,
    RequestOutput,
    Retain,
    SamplingParams,
    StructuredOutput,
    Tool,
)
from pagedllm.assemble import assemble_output
from pagedllm.errors import ContextLengthError, InvalidRequestError, PagedLLMError

CHAT = [Message(role="system", content="Be brief."), Message(role="user", content="Why größe 你好 😀?")]
SCHEMA = {"type": "object", "properties": {"größe": {"enum": [1, "你好"]}}, "required": ["größe"]}


def calling(max_tokens: int, **options: Any) -> GenerateRequest:
    return GenerateRequest(
        messages=(Message(role="user", content="Hi"),),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=3),
        tools=(Tool(name="f", parameters=SCHEMA), Tool(name="g")),
        **options,
    )


REQUESTS: dict[str, GenerateRequest] = {
    "text": request("the cache holds", 12),
    "token ids": request([71, 72, 73, 74], 12),
    "chat": request(CHAT, 12),
    "sampled": request("the cache", 16, temperature=0.9, top_p=0.9, top_k=20, seed=7, ignore_eos=True),
    "penalties": request("a b a b", 12, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2),
    "min tokens": request("the cache", 12, min_tokens=6),
    "bias": request("the cache", 8, logit_bias={65: 5.0}),
    "hinted": GenerateRequest(
        prompt=tuple(range(20, 80)),
        sampling=SamplingParams(max_tokens=4, temperature=0),
        hints=CacheHints(retain=(Retain(num_tokens=32, ttl_s=5.0),), prefix_key="conversation", priority=1),
    ),
    "to the end": request([65] * 500, None, ignore_eos=True),
    "schema": GenerateRequest(
        messages=tuple(CHAT),
        sampling=SamplingParams(max_tokens=40, temperature=0),
        structured_output=StructuredOutput(json_schema=SCHEMA),
    ),
    "choice": GenerateRequest(
        prompt="Yes or no?",
        sampling=SamplingParams(max_tokens=20, temperature=1.0, seed=1),
        structured_output=StructuredOutput(choice=("größe", "no")),
    ),
}
CALLS: dict[str, GenerateRequest] = {
    "call": calling(80, tool_choice="f"),
    "cut call": calling(24, tool_choice="required"),
    "calls": calling(170, tool_choice="required", parallel_tool_calls=True),
    "call or text": calling(80),
    "no call": calling(12, tool_choice="none"),
}
REQUESTS |= CALLS
EACH = pytest.mark.parametrize("name", REQUESTS)


def fresh(asked: GenerateRequest, **sampling: Any) -> GenerateRequest:
    """The same request under another id, since one id is one request."""
    changed = dataclasses.replace(asked.sampling, **sampling)
    return dataclasses.replace(asked, sampling=changed, request_id=uuid.uuid4().hex)


def told(output: RequestOutput) -> Any:
    """All of an answer that does not depend on the clock, the request's name or what was cached before."""
    choices = [dataclasses.replace(choice) for choice in output.choices]
    usage = output.usage
    return (choices, usage.prompt_tokens, usage.completion_tokens, output.prompt_logprobs, output.hints)


def generate(engine: Engine, asked: GenerateRequest) -> RequestOutput:
    (answer,) = engine.generate([asked])
    return output_of(answer)


async def agenerate(engine: Engine, asked: GenerateRequest) -> RequestOutput:
    (answer,) = await engine.agenerate([asked])
    return output_of(answer)


async def collect(engine: Engine, asked: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.astream(asked)]


async def every_way(engine: Engine, asked: GenerateRequest, **sampling: Any) -> dict[str, RequestOutput]:
    """The answer of each way to ask."""
    return {
        "generate": await asyncio.to_thread(generate, engine, fresh(asked, **sampling)),
        "agenerate": await agenerate(engine, fresh(asked, **sampling)),
        "stream": assemble_output(await asyncio.to_thread(lambda: list(engine.stream(fresh(asked, **sampling))))),
        "astream": assemble_output(await collect(engine, fresh(asked, **sampling))),
    }


@EACH
async def test_all_ways_agree(engine: Engine, name: str) -> None:
    """An answer that depends on how it was asked for cannot be tested, cached or trusted."""
    answers = await every_way(engine, REQUESTS[name])
    want = answers["generate"]
    assert want.choices[0].token_ids
    assert want.usage.completion_tokens == len(want.choices[0].token_ids)
    assert want.choices[0].finish_reason in ("stop", "length", "tool_calls")
    for way, answer in answers.items():
        assert told(answer) == told(want), way


@pytest.mark.parametrize("name", CALLS)
def test_calls(engine: Engine, name: str) -> None:
    """A call that was cut must not pass for a whole one, wherever it was computed, nor a whole one for a text."""
    [choice] = generate(engine, fresh(CALLS[name])).choices
    is_whole = choice.finish_reason == "tool_calls"
    assert not (is_whole and not choice.tool_calls)
    if name == "cut call":
        assert choice.finish_reason == "length"
    elif CALLS[name].must_call:
        assert is_whole
        assert not choice.text
    elif name == "no call":
        assert not choice.tool_calls
    for call in choice.tool_calls if is_whole else ():
        arguments = json.loads(call.arguments)
        assert arguments.get("größe") in (1, "你好") if call.name == "f" else arguments == {}
    assert len({call.id for call in choice.tool_calls}) == len(choice.tool_calls)


def test_answers_have_their_form(engine: Engine) -> None:
    assert json.loads(generate(engine, fresh(REQUESTS["schema"])).text)["größe"] in (1, "你好")
    assert generate(engine, fresh(REQUESTS["choice"])).text in ("größe", "no")


@EACH
def test_remote_is_local(local_engine: Any, remote_engine: Any, name: str) -> None:
    """The one law of the switch: the same request, the same answer, down to the token ids."""
    local, remote = generate(local_engine, fresh(REQUESTS[name])), generate(remote_engine, fresh(REQUESTS[name]))
    assert told(remote) == told(local)
    # Asked for a second time both find the same in the cache.
    local, remote = generate(local_engine, fresh(REQUESTS[name])), generate(remote_engine, fresh(REQUESTS[name]))
    assert remote.usage == local.usage
    assert remote.timings.total_s > 0


def test_batch_is_singles(engine: Engine) -> None:
    """A batch whose answers are mixed up, or depend on their company."""
    requests = [fresh(asked) for asked in REQUESTS.values()]
    singles = [told(generate(engine, fresh(asked))) for asked in requests]
    answers = [output_of(answer) for answer in engine.generate(requests)]
    assert [answer.request_id for answer in answers] == [asked.request_id for asked in requests]
    assert [told(answer) for answer in answers] == singles
    again = [fresh(asked) for asked in requests]
    assert [told(output_of(answer)) for answer in asyncio.run(engine.agenerate(again))] == singles
    assert engine.generate([]) == []


def test_stream_form(engine: Engine) -> None:
    """Consumers lean on it: pieces as they come, then one end with usage and timings."""
    asked = fresh(REQUESTS["text"], max_tokens=20, ignore_eos=True)
    chunks = list(engine.stream(asked))
    assert len(chunks) > 3
    assert {chunk.request_id for chunk in chunks} == {asked.request_id}
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    last = chunks[-1]
    assert (last.finish_reason, last.timings is not None) == ("length", True)
    assert "".join(chunk.text for chunk in chunks) == generate(engine, fresh(asked)).text


async def test_stop_string(engine: Engine) -> None:
    """A stop string that leaks in part, or is told differently by the ways to ask."""
    whole = generate(engine, fresh(REQUESTS["chat"], max_tokens=30, ignore_eos=True)).text
    stop = whole[7:10]
    place = whole.index(stop)
    for answer in (await every_way(engine, REQUESTS["chat"], max_tokens=30, ignore_eos=True, stop=(stop,))).values():
        assert answer.text == whole[:place]
        assert (answer.choices[0].finish_reason, answer.choices[0].stop_reason) == ("stop", stop)


async def test_stop_token(engine: Engine) -> None:
    token_id = generate(engine, fresh(REQUESTS["token ids"])).choices[0].token_ids[3]
    for answer in (await every_way(engine, REQUESTS["token ids"], stop_token_ids=(token_id,))).values():
        choice = answer.choices[0]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", token_id)
        assert choice.token_ids[-1] == token_id


@pytest.mark.parametrize("name", ["text", "chat"])
async def test_logprobs(engine: Engine, name: str) -> None:
    """Ids, texts and numbers must survive the way, in both forms that OpenAI's API has."""
    answers = await every_way(engine, REQUESTS[name], logprobs=3, max_tokens=6)
    want = answers["generate"].choices[0]
    assert want.logprobs is not None
    assert [item.token_id for item in want.logprobs] == list(want.token_ids)
    assert all(len(item.top) == 3 and item.logprob <= 0 for item in want.logprobs)
    for way, answer in answers.items():
        assert answer.choices == (want,), way


async def test_prompt_logprobs(engine: Engine) -> None:
    answers = await every_way(engine, REQUESTS["token ids"], prompt_logprobs=2)
    want = answers["generate"].prompt_logprobs
    assert want is not None
    assert want[0] is None
    assert len(want) == 4
    assert [answer.prompt_logprobs for answer in answers.values()] == [want] * 4


async def test_choices(engine: Engine) -> None:
    """Choices that are mixed up in a stream, or counted once each."""
    answers = await every_way(engine, REQUESTS["sampled"], n=3, logprobs=1)
    want = answers["generate"]
    assert [choice.index for choice in want.choices] == [0, 1, 2]
    assert len({choice.text for choice in want.choices}) > 1
    assert want.usage.completion_tokens == sum(len(choice.token_ids) for choice in want.choices)
    for way, answer in answers.items():
        assert told(answer) == told(want), way


# --- Errors ---

REFUSED: dict[str, tuple[GenerateRequest, type[PagedLLMError]]] = {
    "long prompt": (request([65] * 600, 4), ContextLengthError),
    "too many new": (request([65] * 20, 500), ContextLengthError),
    "token id": (request([2_000_000], 4), InvalidRequestError),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_errors(engine: Engine, name: str) -> None:
    """A caller shortens its prompt for the one class, and gives up for the other."""
    asked, kind = REFUSED[name]
    good = fresh(REQUESTS["text"])
    errors = [engine.generate([fresh(asked), good])[0], (await engine.agenerate([fresh(asked)]))[0]]
    with pytest.raises(PagedLLMError) as caught:
        list(engine.stream(fresh(asked)))
    errors.append(caught.value)
    with pytest.raises(PagedLLMError) as caught:
        await collect(engine, fresh(asked))
    errors.append(caught.value)
    assert [type(error) for error in errors] == [kind] * 4
    assert len({(str(error), error.param) for error in errors}) == 1  # type: ignore[union-attr]


BAD_SCHEMA = StructuredOutput(json_schema={"type": "nope"})
REFUSED_BY_GRAMMAR = {
    "schema": dataclasses.replace(REQUESTS["schema"], structured_output=BAD_SCHEMA),
    "tool": dataclasses.replace(CALLS["call"], tools=(Tool(name="f", parameters={"type": "array"}),)),
}


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_BY_GRAMMAR])
def test_remote_errors_are_local(local_engine: Any, remote_engine: Any, name: str) -> None:
    asked = REFUSED_BY_GRAMMAR[name] if name in REFUSED_BY_GRAMMAR else REFUSED[name][0]
    (local,), (remote,) = local_engine.generate([fresh(asked)]), remote_engine.generate([fresh(asked)])
    assert (type(remote), str(remote), remote.param, remote.code) == (type(local), str(local), local.param, local.code)


def test_request_id_in_flight(subject: Any) -> None:
    """The second request of a name is refused, and the first goes on."""
    asked = fresh(REQUESTS["token ids"], max_tokens=200, ignore_eos=True)
    chunks = subject.engine.stream(asked)
    first = next(iter(chunks))
    (error,) = subject.engine.generate([asked])
    assert (type(error), getattr(error, "param", None)) == (InvalidRequestError, "request_id")
    assert sum(len(chunk.token_ids) for chunk in [first, *chunks]) == 200
    wait_until_at_rest(subject.source)


# --- Ending early ---


@pytest.mark.parametrize("how", ["close", "abort", "drop"])
def test_stream_ends_early(subject: Any, how: str) -> None:
    """What nobody reads must not be computed."""
    asked = fresh(REQUESTS["token ids"], max_tokens=200, ignore_eos=True)
    before = subject.source.stats().num_generated_tokens
    chunks = subject.engine.stream(asked)
    next(iter(chunks))
    if how == "close":
        chunks.close()
    elif how == "abort":
        subject.engine.abort(asked.request_id)
        rest = list(chunks)
        assert rest[-1].finish_reason == "abort"
        assert rest[-1].usage is not None
    else:
        del chunks
    wait_until_at_rest(subject.source)
    assert subject.source.stats().num_generated_tokens - before < 200


@pytest.mark.parametrize("how", ["aclose", "abort", "cancel"])
async def test_async_stream_ends_early(subject: Any, how: str) -> None:
    asked = fresh(REQUESTS["token ids"], max_tokens=200, ignore_eos=True)
    chunks = subject.engine.astream(asked)
    await anext(aiter(chunks))
    if how == "aclose":
        await chunks.aclose()
    elif how == "abort":
        subject.engine.abort(asked.request_id)
        rest = [chunk async for chunk in chunks]
        assert rest[-1].finish_reason == "abort"
    else:
        task = asyncio.ensure_future(_drain(chunks))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del chunks, task
    await asyncio.to_thread(wait_until_at_rest, subject.source)


async def _drain(chunks: Any) -> None:
    async for _ in chunks:
        pass


def test_aborted_generate(subject: Any) -> None:
    asked = fresh(REQUESTS["token ids"], max_tokens=230, ignore_eos=True)
    before = subject.source.stats().num_running
    timer = threading.Thread(target=lambda: _abort_when_running(subject, asked.request_id))
    timer.start()
    (answer,) = subject.engine.generate([asked])
    timer.join()
    assert before == 0
    assert output_of(answer).choices[0].finish_reason == "abort"
    wait_until_at_rest(subject.source)


def _abort_when_running(subject: Any, request_id: str) -> None:
    while not subject.source.stats().num_running:
        pass
    subject.engine.abort(request_id)


# --- Beside generation ---


def test_tokens(engine: Engine) -> None:
    ids = engine.tokenize("größe 你好", add_special_tokens=False)
    assert engine.detokenize(ids) == "größe 你好"
    assert engine.count_tokens(fresh(REQUESTS["chat"])) == generate(engine, fresh(REQUESTS["chat"])).usage.prompt_tokens
    told = generate(engine, fresh(REQUESTS["no call"]))
    assert engine.count_tokens(fresh(REQUESTS["no call"])) == told.usage.prompt_tokens
    assert engine.count_tokens(fresh(REQUESTS["text"])) == len(engine.tokenize("the cache holds"))
    assert engine.count_tokens(request([1, 2, 3], 4)) == 3


async def test_cache(subject: Any) -> None:
    """The hints of a request, and what became of them, must reach the engine and come back."""
    engine = subject.engine
    prompt = [(7 * index) % 200 + 20 for index in range(100)]
    await engine.areset_prefix_cache()
    assert engine.match_prefix(request(prompt, 4)) == 0
    generate(engine, request(prompt, 1))
    found = engine.match_prefix(request(prompt, 4))
    assert 80 <= found < 100
    assert await engine.amatch_prefix(request(prompt, 4)) == found
    assert generate(engine, request(prompt, 4)).usage.cached_tokens == found
    assert generate(engine, request(prompt, 4, salt="other")).usage.cached_tokens == 0
    engine.reset_prefix_cache()
    assert generate(engine, request(prompt, 4)).usage.cached_tokens == 0
    assert engine.stats().num_cached_blocks > 0
    assert (await engine.astats()).num_blocks == subject.source.stats().num_blocks


async def test_warm(engine: Engine) -> None:
    """Computes the prompt and nothing else, whether a thread or an event loop asks."""
    prompt = [(11 * index) % 200 + 20 for index in range(100)]
    engine.reset_prefix_cache()
    first = engine.warm(request(prompt, 4))
    second = await engine.awarm(request(prompt, 4))
    assert [(output.text, output.usage.completion_tokens) for output in (first, second)] == [("", 0)] * 2
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens == engine.match_prefix(request(prompt, 4)) >= 80


def test_model_and_health(subject: Any, tiny_model: TinyModel) -> None:
    info, source = subject.engine.model_info(), subject.source.model_info()
    assert dataclasses.replace(info, model="") == dataclasses.replace(source, model="")
    assert subject.engine.health().ok
