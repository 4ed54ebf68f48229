"""Answers with a structure, on the embedded model: valid when whole, cut when cut, and nobody else's affair."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import pytest
from conftest import SMOLLM2_FLOAT32, TinyModel
from engine_helpers import ids, output_of, request, run, token_ids, wait_until_at_rest
from output_schemas import SCHEMAS

from pagedllm.api import GenerateRequest, Message, RequestOutput, SamplingParams, StructuredOutput
from pagedllm.errors import InvalidRequestError
from pagedllm.local import LocalEngine

pytestmark = pytest.mark.model


def asking(
    text: str, output: StructuredOutput, max_tokens: int = 100, *, request_id: str | None = None, **sampling: Any
) -> GenerateRequest:
    named = {} if request_id is None else {"request_id": request_id}
    return GenerateRequest(
        messages=(Message(role="user", content=text),),
        structured_output=output,
        sampling=SamplingParams(**{"temperature": 1.0, "seed": 1, "max_tokens": max_tokens, **sampling}),
        **named,
    )


def check(schema: dict[str, Any], output: RequestOutput) -> bool:
    """Whether it is whole. Then it is valid; else it is the beginning of something, and says so."""
    [choice] = output.choices
    if choice.finish_reason == "length":
        return False
    assert choice.finish_reason == "stop"
    jsonschema_rs.validate(schema, json.loads(choice.text))
    return True


@pytest.mark.parametrize("num_each", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_answers_over_10_schemas(engine: LocalEngine, num_each: int) -> None:
    """A mask for the wrong row, a token late or early: the answer is no JSON, or not of the schema."""
    asked = [
        (schema, asking(f"{name} as JSON", StructuredOutput(json_schema=schema), 5 if seed % 4 == 3 else 90, seed=seed))
        for name, schema in SCHEMAS.items()
        for seed in range(num_each)
    ]
    outputs = run(engine, *(item for _, item in asked))
    num_whole = sum(check(schema, output) for (schema, _), output in zip(asked, outputs, strict=True))
    assert len(asked) * 0.6 <= num_whole < len(asked)


# Three of each kind of test, and the rest where there is more time.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if i >= 3 else ()) for i, name in enumerate(SCHEMAS)]
)
def test_streamed_pieces_join_to_the_same_answer(engine: LocalEngine, name: str) -> None:
    asked = asking(f"{name}, please", StructuredOutput(json_schema=SCHEMAS[name]))
    whole = run(engine, asked)[0]
    chunks = list(engine.stream(asked))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert (chunks[-1].finish_reason, chunks[-1].usage) == (whole.choices[0].finish_reason, whole.usage) or (
        chunks[-1].usage is not None and chunks[-1].usage.cached_tokens > whole.usage.cached_tokens
    )
    # Nothing but the text is the answer's.
    assert not any(chunk.tool_calls or chunk.reasoning for chunk in chunks)


@pytest.mark.parametrize(
    ("output", "pattern"),
    [
        ({"regex": r"[A-Z][a-z]{2,9}, [0-9]{4}"}, r"[A-Z][a-z]{2,9}, [0-9]{4}"),
        ({"choice": ("yes", "no", "日本")}, "yes|no|日本"),
        ({"grammar": 'root ::= "<" [a-z] [a-z] ">"'}, "<[a-z]{2}>"),
    ],
)
def test_regex_choice_and_grammar(engine: LocalEngine, output: dict[str, Any], pattern: str) -> None:
    """For texts as well as for chats."""
    structure = StructuredOutput(**output)
    prompt = GenerateRequest(
        prompt="It was", structured_output=structure, sampling=SamplingParams(max_tokens=60, temperature=1.0, seed=3)
    )
    for answer in run(engine, asking("When?", structure), prompt):
        assert re.fullmatch(pattern, answer.text)
        assert answer.choices[0].finish_reason == "stop"


def test_an_answer_ends_where_it_is_complete(engine: LocalEngine) -> None:
    """Its last token may be the last one allowed: it is whole, not cut."""
    output = StructuredOutput(choice=("yes", "no"))
    first = run(engine, asking("?", output))[0]
    assert run(engine, asking("?", output, max_tokens=first.usage.completion_tokens))[0].choices == first.choices
    assert first.choices[0].stop_reason is None


def test_stop_strings_end_it_too(engine: LocalEngine) -> None:
    output = StructuredOutput(regex="[a-z]{3}-[a-z]{30}")
    [answer] = run(engine, asking("?", output, stop=("-",)))
    assert re.fullmatch("[a-z]{3}", answer.text)
    assert answer.choices[0].stop_reason == "-"


def test_logprobs_are_of_the_raw_logits(engine: LocalEngine) -> None:
    """Those of masked ones would say that the model was sure of what it was forced to."""
    output = StructuredOutput(choice=("zebra",))
    [answer] = run(engine, asking("What is 1 + 1?", output, logprobs=2, temperature=0.0))
    assert answer.text == "zebra"
    first = (answer.choices[0].logprobs or ())[0]
    assert first.logprob < -5
    assert first.token_id not in [item.token_id for item in first.top]


def test_neighbours_are_left_alone(engine: LocalEngine) -> None:
    """A mask on the wrong row changes what another says."""
    free = [request(ids(20, offset), 24) for offset in range(3)]
    alone = [token_ids(run(engine, item)[0]) for item in free]
    schema = SCHEMAS["flat"]
    structured = [asking("Ada", StructuredOutput(json_schema=schema), seed=seed) for seed in range(3)]
    alone_texts = [run(engine, item)[0].text for item in structured]
    mixed = [item for pair in zip(free, structured, strict=True) for item in pair]
    outputs = run(engine, *mixed)
    assert [token_ids(output) for output in outputs[::2]] == alone
    assert [output.text for output in outputs[1::2]] == alone_texts


def test_choices_have_matchers_of_their_own(engine: LocalEngine) -> None:
    """One matcher for all would take each one's tokens for the others'."""
    schema = SCHEMAS["flat"]
    [output] = run(engine, asking("Somebody", StructuredOutput(json_schema=schema), n=4, max_tokens=80))
    texts = [choice.text for choice in output.choices if choice.finish_reason == "stop"]
    assert len(texts) >= 2
    assert len(set(texts)) > 1
    for text in texts:
        jsonschema_rs.validate(schema, json.loads(text))


@pytest.mark.parametrize("swap", [0.0, 0.01])
def test_preemption_does_not_show(tiny_model: TinyModel, swap: float) -> None:
    """A sequence that is computed again must not have its tokens taken twice."""
    output = StructuredOutput(json_schema={"type": "array", "items": {"type": "integer"}, "minItems": 40})
    requests = [
        GenerateRequest(
            prompt=tuple(range(10 + i, 30 + i)),
            structured_output=output,
            sampling=SamplingParams(max_tokens=60, temperature=1.0, seed=i),
        )
        for i in range(4)
    ]
    with tiny_model.engine() as roomy:
        expected = [token_ids(run(roomy, item)[0]) for item in requests]
        size = roomy.model_info().kv_bytes_per_token * roomy.model_info().block_size
    with tiny_model.engine(kv_cache_memory_bytes=size * 12, max_model_len=128, swap_space=swap) as tight:
        assert [token_ids(item) for item in run(tight, *requests)] == expected
        assert tight.stats().num_preemptions > 0
        wait_until_at_rest(tight)


HARD = "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1} |" for i in range(30)) + '\na30: "x" |'


def test_a_grammar_that_is_too_hard_ends_its_request_alone(engine: LocalEngine) -> None:
    """It is found out in the thread that all share: neither that thread nor anybody else's request may suffer."""
    hard = asking("x", StructuredOutput(grammar=HARD), 400)
    other = request(ids(12), 30)
    failed, fine = engine.generate([hard, other])
    assert isinstance(failed, InvalidRequestError)
    assert failed.param == "structured_output"
    assert "too hard to follow" in str(failed)
    assert token_ids(output_of(fine)) == token_ids(run(engine, other)[0])
    with pytest.raises(InvalidRequestError, match="too hard"):
        list(engine.stream(hard))
    wait_until_at_rest(engine)


async def test_async_and_errors(engine: LocalEngine) -> None:
    """The loop does not wait for a grammar, and what is wrong with one is told all the same."""
    good = asking("Ada", StructuredOutput(json_schema=SCHEMAS["bounds"]))
    bad = asking("Ada", StructuredOutput(json_schema={"type": "nope"}))
    expected = run(engine, good)[0].text
    results: Sequence[Any] = await engine.agenerate([good, bad])
    assert results[0].text == expected
    assert isinstance(results[1], InvalidRequestError)
    assert "".join([chunk.text async for chunk in engine.astream(good)]) == expected
    with pytest.raises(InvalidRequestError, match="nope"):
        await engine.astream(bad).__anext__()
    stream = engine.astream(good)
    await stream.aclose()
    assert [chunk async for chunk in stream] == []
    half = engine.astream(asking("Ada", StructuredOutput(regex="[a-z]+"), 2000))
    await half.__anext__()
    await half.aclose()
    wait_until_at_rest(engine)


def test_warming_needs_no_grammar(engine: LocalEngine) -> None:
    bad = asking("Ada", StructuredOutput(json_schema={"type": "nope"}))
    assert engine.warm(bad).usage.completion_tokens == 0


def test_it_is_the_shared_engine(engine: LocalEngine) -> None:
    """In float32, so that laws about tokens are exact."""
    assert engine.config == SMOLLM2_FLOAT32
