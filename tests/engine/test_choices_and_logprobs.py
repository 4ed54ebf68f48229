"""Several choices of one prompt, log probabilities of completion and prompt, and tokens before which nothing stops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import TinyModel
from engine_helpers import assert_at_rest, request, run, token_ids, wait_until_at_rest

from pagedllm.api import RequestOutput
from pagedllm.local import LocalEngine

BLOCK_BYTES = 16 * 2 * 3 * 2 * 16 * 4
PROMPT = [3 + i * 7 % 300 for i in range(70)]
SAMPLED: dict[str, Any] = {"temperature": 1.2, "seed": 5, "ignore_eos": True}


def all_ids(output: RequestOutput) -> list[list[int]]:
    return [list(choice.token_ids) for choice in output.choices]


def test_choices_differ_and_each_is_its_own_whatever_n_is(tiny_engine: LocalEngine):
    """Choice i depends on seed and index alone: more siblings, another schedule or a cached prefix change nothing."""
    three = run(tiny_engine, request(PROMPT, 20, n=3, **SAMPLED))[0]
    five = run(tiny_engine, request(PROMPT, 20, n=5, **SAMPLED))[0]
    assert [choice.index for choice in five.choices] == [0, 1, 2, 3, 4]
    assert all_ids(five)[:3] == all_ids(three)
    assert len({tuple(item) for item in all_ids(five)}) == 5
    assert all_ids(run(tiny_engine, request(PROMPT, 20, **SAMPLED))[0]) == all_ids(three)[:1]


def test_greedy_choices_are_equal(tiny_engine: LocalEngine):
    output = run(tiny_engine, request(PROMPT, 20, n=3))[0]
    assert len({choice.text for choice in output.choices}) == 1


def test_usage_counts_the_prompt_once(tiny_engine: LocalEngine):
    output = run(tiny_engine, request(PROMPT, 20, n=4, **SAMPLED))[0]
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (70, 80)
    assert output.usage.cached_tokens == 0, "siblings sharing the prompt are not a hit across requests"
    assert tiny_engine.stats().prefix_hits == 0


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_choices_share_the_blocks_of_the_prompt(enable_prefix_caching: bool, tiny_model: TinyModel):
    """70 tokens are four full blocks, stored once, and one tail block for each choice."""
    most = 0.0

    def watch(record: Any) -> None:
        nonlocal most
        most = max(most, record.kv_cache_usage)

    from pagedllm.config import EngineConfig

    config = EngineConfig(
        model=tiny_model.path,
        dtype="float32",
        kv_cache_memory_bytes=100 * BLOCK_BYTES,
        enable_prefix_caching=enable_prefix_caching,
    )
    with LocalEngine(config, on_step=watch) as engine:
        run(engine, request(PROMPT, 8, n=6, **SAMPLED))
        assert_at_rest(engine.stats())
    assert round(most * 100) == 4 + 6


def test_choices_survive_preemption(tiny_model: TinyModel):
    with tiny_model.engine() as roomy:
        expected = all_ids(run(roomy, request(PROMPT, 100, n=6, **SAMPLED))[0])
    with tiny_model.engine(kv_cache_memory_bytes=30 * BLOCK_BYTES) as tight:
        assert all_ids(run(tight, request(PROMPT, 100, n=6, **SAMPLED))[0]) == expected
        stats = tight.stats()
        assert stats.num_preemptions > 0
        assert_at_rest(stats)


def test_a_stream_of_choices(tiny_engine: LocalEngine):
    chunks = list(tiny_engine.stream(request(PROMPT, 20, n=3, **SAMPLED)))
    whole = run(tiny_engine, request(PROMPT, 20, n=3, **SAMPLED))[0]
    for choice in whole.choices:
        mine = [chunk for chunk in chunks if chunk.index == choice.index]
        assert "".join(chunk.text for chunk in mine) == choice.text
        assert [chunk.finish_reason for chunk in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == choice.finish_reason
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_a_slow_reader_of_many_choices_loses_nothing(tiny_engine: LocalEngine):
    """Merged deltas keep their choice, and the last chunk stays last."""
    stream = tiny_engine.stream(request(PROMPT, 200, n=4, **SAMPLED))
    wait_until_at_rest(tiny_engine)
    chunks = list(stream)
    whole = run(tiny_engine, request(PROMPT, 200, n=4, **SAMPLED))[0]
    assert len(chunks) < 100
    for choice in whole.choices:
        assert "".join(chunk.text for chunk in chunks if chunk.index == choice.index) == choice.text


def test_closing_a_stream_ends_all_choices(tiny_engine: LocalEngine):
    stream = tiny_engine.stream(request(PROMPT, 300, n=4, **SAMPLED))
    next(stream)
    stream.close()
    wait_until_at_rest(tiny_engine)


@torch.inference_mode()
def reference_logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """Log probabilities of every next token, [len(ids) - 1, vocab_size]."""
    return model(torch.tensor([ids]), use_cache=False).logits[0, :-1].double().log_softmax(-1)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 3, "seed": 1}])
def test_logprobs_are_of_the_raw_logits(options: dict[str, Any], tiny_model: TinyModel, tiny_engine: LocalEngine):
    output = run(tiny_engine, request(PROMPT, 20, ignore_eos=True, logprobs=3, logit_bias={50: 2.0}, **options))[0]
    choice = output.choices[0]
    assert choice.logprobs is not None
    assert [item.token_id for item in choice.logprobs] == list(choice.token_ids)
    expected = reference_logprobs(tiny_model.reference, PROMPT + token_ids(output))[len(PROMPT) - 1 :]
    for item, row in zip(choice.logprobs, expected, strict=True):
        assert item.logprob == pytest.approx(float(row[item.token_id]), abs=1e-4)
        assert [top.token_id for top in item.top] == row.topk(3).indices.tolist()
        assert [top.logprob for top in item.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
        assert item.token == tiny_engine.detokenize([item.token_id])


def test_logprobs_of_a_neighbour_change_nothing(tiny_engine: LocalEngine):
    alone = run(tiny_engine, request(PROMPT, 20))[0]
    plain, scored = run(tiny_engine, request(PROMPT, 20), request(PROMPT, 20, logprobs=0))
    assert plain.text == scored.text == alone.text
    assert plain.choices[0].logprobs is None
    assert scored.choices[0].logprobs is not None
    assert all(item.top == () for item in scored.choices[0].logprobs)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 4}], ids=["whole", "chunks"])
def test_prompt_logprobs_also_with_a_cached_prefix(options: dict[str, Any], tiny_model: TinyModel):
    """Other engines have answered the second time with an assertion, or with the uncached part only."""
    expected = reference_logprobs(tiny_model.reference, PROMPT)
    with tiny_model.engine(**options) as engine:
        for _ in range(2):
            output = run(engine, request(PROMPT, 4, prompt_logprobs=2))[0]
            scores = output.prompt_logprobs
            assert scores is not None
            assert len(scores) == len(PROMPT)
            assert scores[0] is None
            for position, (item, row) in enumerate(zip(scores[1:], expected, strict=True), start=1):
                assert item is not None
                assert item.token_id == PROMPT[position]
                assert item.logprob == pytest.approx(float(row[item.token_id]), abs=1e-4)
                assert [top.token_id for top in item.top] == row.topk(2).indices.tolist()
        assert run(engine, request(PROMPT, 4))[0].usage.cached_tokens == 64
        assert_at_rest(engine.stats())


def test_prompt_logprobs_survive_preemption_and_choices(tiny_model: TinyModel):
    expected = reference_logprobs(tiny_model.reference, PROMPT)
    with tiny_model.engine(kv_cache_memory_bytes=24 * BLOCK_BYTES) as engine:
        outputs = run(engine, *(request(PROMPT, 80, n=2, prompt_logprobs=0, **SAMPLED | {"seed": i}) for i in range(4)))
        assert engine.stats().num_preemptions > 0
    for output in outputs:
        assert output.prompt_logprobs is not None
        values = [item.logprob for item in output.prompt_logprobs[1:] if item is not None]
        chosen = [float(row[token_id]) for row, token_id in zip(expected, PROMPT[1:], strict=True)]
        assert values == pytest.approx(chosen, abs=1e-4)


def test_min_tokens_holds_off_every_kind_of_stop(tiny_engine: LocalEngine):
    """EOS, stop token and stop string."""
    free = run(tiny_engine, request(PROMPT, 30, ignore_eos=True))[0]
    ids, text = token_ids(free), free.text
    early = next(token_id for token_id in ids[:5] if tiny_engine.detokenize([token_id]))
    held = run(tiny_engine, request(PROMPT, 30, min_tokens=12, stop_token_ids=[early]))[0]
    assert held.usage.completion_tokens > 12
    assert early not in token_ids(held)[:12]
    first = tiny_engine.detokenize(ids[:12]).rstrip("\N{REPLACEMENT CHARACTER}")
    character = next(item for item in first if item.isascii() and item.isalpha())
    stopped = run(tiny_engine, request(PROMPT, 30, ignore_eos=True, min_tokens=12, stop=[character]))[0]
    rest = text[len(first) :]
    assert stopped.text == first + rest.partition(character)[0]
    streamed = tiny_engine.stream(request(PROMPT, 30, ignore_eos=True, min_tokens=12, stop=[character]))
    assert "".join(chunk.text for chunk in streamed) == stopped.text


def test_min_tokens_with_eos(tiny_engine: LocalEngine):
    """An EOS that is the most probable token by far."""
    bias = {2: 100.0}
    assert run(tiny_engine, request(PROMPT, 30, logit_bias=bias))[0].usage.completion_tokens == 1
    held = run(tiny_engine, request(PROMPT, 30, logit_bias=bias, min_tokens=10))[0]
    assert held.usage.completion_tokens == 11
    assert held.choices[0].finish_reason == "stop"


def test_penalties_act_and_stay_with_their_request(tiny_engine: LocalEngine):
    plain = request(PROMPT, 40, ignore_eos=True)
    alone = run(tiny_engine, plain)[0]
    together = run(
        tiny_engine,
        request(PROMPT, 40, ignore_eos=True),
        request(PROMPT, 40, ignore_eos=True, frequency_penalty=2.0, presence_penalty=2.0),
        request(PROMPT, 40, ignore_eos=True, repetition_penalty=5.0),
        request(PROMPT, 40, ignore_eos=True, min_p=0.9, temperature=1.0, seed=1),
    )
    assert together[0].text == alone.text
    repeated = [len(ids) - len(set(ids)) for ids in map(token_ids, together)]
    assert repeated[1] < repeated[0]
    assert repeated[2] < repeated[0]
