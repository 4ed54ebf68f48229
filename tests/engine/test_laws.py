"""The cache, the batch and the schedule are invisible in the text: laws 1, 3, 4 and 6 on a real engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import TinyModel
from engine_helpers import assert_at_rest, request, run, token_ids
from reference import assert_greedy

from pagedllm.api import GenerateRequest
from pagedllm.local import LocalEngine

BLOCK_BYTES = 16 * 2 * 3 * 2 * 16 * 4  # block_size, keys and values, layers, KV heads, head_dim, float32


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


LONG_PROMPTS = [random_ids(100 + 7 * i, seed=i) for i in range(6)]
VARIANTS: dict[str, dict[str, Any]] = {
    "chunks of 16": {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    "pool of 40 blocks": {"kv_cache_memory_bytes": 40 * BLOCK_BYTES},
    "pool of 40 blocks, chunks of 16": {
        "kv_cache_memory_bytes": 40 * BLOCK_BYTES,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 6,
    },
    "pool of 40 blocks, no prefix cache": {
        "kv_cache_memory_bytes": 40 * BLOCK_BYTES,
        "enable_prefix_caching": False,
    },
    "pool of 40 blocks, swapped": {
        "kv_cache_memory_bytes": 40 * BLOCK_BYTES,
        "swap_space": 0.125,
        "preemption_mode": "swap",
    },
    "pool of 40 blocks, swapped, no prefix cache": {
        "kv_cache_memory_bytes": 40 * BLOCK_BYTES,
        "swap_space": 0.125,
        "preemption_mode": "swap",
        "enable_prefix_caching": False,
    },
    "pool of 40 blocks, shortest first": {
        "kv_cache_memory_bytes": 40 * BLOCK_BYTES,
        "swap_space": 0.125,
        "scheduling_policy": "shortest",
    },
    "no prefix cache": {"enable_prefix_caching": False},
    "one at a time": {"max_num_seqs": 1},
}


@pytest.fixture(scope="module")
def alone(tiny_model: TinyModel) -> dict[str, list[list[int]]]:
    """Each long prompt by itself on a cold, roomy engine: greedy and sampled."""
    with tiny_model.engine(enable_prefix_caching=False) as engine:
        return {kind: [token_ids(run(engine, item)[0]) for item in requests_of(kind)] for kind in ("greedy", "sampled")}


def requests_of(kind: str) -> list[GenerateRequest]:
    options: dict[str, Any] = {"ignore_eos": True}
    if kind == "sampled":
        options |= {"temperature": 1.0, "top_p": 0.9, "top_k": 50}
    return [
        request(prompt, 60, **options, **({"seed": i} if kind == "sampled" else {}))
        for i, prompt in enumerate(LONG_PROMPTS)
    ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_tokens_however_it_is_scheduled(variant: str, tiny_model: TinyModel, alone: dict[str, list[list[int]]]):
    with tiny_model.engine(**VARIANTS[variant]) as engine:
        for _ in range(2):  # the second round over whatever the first left in the cache
            for prompt, output in zip(LONG_PROMPTS, run(engine, *requests_of("greedy")), strict=True):
                assert_greedy(tiny_model.reference, prompt, token_ids(output))
            sampled = [token_ids(output) for output in run(engine, *requests_of("sampled"))]
            assert sampled == alone["sampled"]
        stats = engine.stats()
        assert ("pool of 40" in variant) == (stats.num_preemptions > 0)
        assert ("swapped" not in variant) or stats.num_swapped_in_blocks > 0
        assert_at_rest(stats)


@pytest.mark.parametrize("length", [15, 16, 17, 32, 64, 65])
def test_a_prefix_hit_is_invisible(length: int, tiny_model: TinyModel, tiny_engine: LocalEngine):
    """Small engines crash or garble when a prompt of whole blocks is cached to its end."""
    prompt = random_ids(length, seed=length)
    outputs = [run(tiny_engine, request(prompt, 20, ignore_eos=True))[0] for _ in range(3)]
    for output in outputs:
        assert_greedy(tiny_model.reference, prompt, token_ids(output))
    assert [output.usage.cached_tokens for output in outputs] == [0, *[(length - 1) // 16 * 16] * 2]
    assert {output.usage.prompt_tokens for output in outputs} == {length}


def test_equal_prompts_in_one_cold_batch(tiny_model: TinyModel, tiny_engine: LocalEngine):
    """The second must not take blocks that the first has allocated but not computed; it waits for them."""
    prompt = random_ids(64, seed=5)
    prompts = [prompt, prompt, prompt + random_ids(9, seed=6)]
    outputs = run(tiny_engine, *(request(item, 20, ignore_eos=True) for item in prompts))
    for item, output in zip(prompts, outputs, strict=True):
        assert_greedy(tiny_model.reference, item, token_ids(output))
    assert [output.usage.cached_tokens for output in outputs] == [0, 48, 64]
    assert_at_rest(tiny_engine.stats())


def test_generated_tokens_are_cached_for_the_next_turn(tiny_engine: LocalEngine):
    prompt = random_ids(20, seed=7)
    first = run(tiny_engine, request(prompt, 30, ignore_eos=True))[0]
    second = run(tiny_engine, request(prompt + token_ids(first), 4))[0]
    assert second.usage.cached_tokens == 48


def test_a_salt_separates_prefixes(tiny_engine: LocalEngine):
    """Public case P10: sharing across tenants would leak by timing what others asked."""
    prompt = random_ids(160, seed=8)
    salts = ["A", "A", "B", None, "A"]
    outputs = [run(tiny_engine, request(prompt, 8, salt=salt))[0] for salt in salts]
    assert [output.usage.cached_tokens for output in outputs] == [0, 144, 0, 0, 144]
    assert len({output.text for output in outputs}) == 1


def test_match_prefix_tells_and_changes_nothing(tiny_engine: LocalEngine):
    prompt = request(random_ids(50, seed=9), 4)
    assert tiny_engine.match_prefix(prompt) == 0
    run(tiny_engine, prompt)
    before = tiny_engine.stats()
    assert tiny_engine.match_prefix(prompt) == 48
    assert tiny_engine.stats() == before


def test_reset_makes_the_next_request_cold(tiny_engine: LocalEngine):
    prompt = random_ids(50, seed=10)
    for _ in range(2):
        run(tiny_engine, request(prompt, 4))
    tiny_engine.reset_prefix_cache()
    assert run(tiny_engine, request(prompt, 4))[0].usage.cached_tokens == 0


def test_streamed_text_is_the_whole_text(tiny_engine: LocalEngine):
    for seed in range(5):
        one = request(random_ids(30, seed=seed), 50, temperature=1.5, seed=seed)
        chunks = list(tiny_engine.stream(one))
        whole = run(tiny_engine, request(random_ids(30, seed=seed), 50, temperature=1.5, seed=seed))[0]
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish_reason == whole.choices[0].finish_reason
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == len(token_ids(whole))
        assert tiny_engine.detokenize([item for chunk in chunks for item in chunk.token_ids]) == whole.text


def test_a_seed_repeats_and_none_varies(tiny_engine: LocalEngine):
    prompt = random_ids(20, seed=11)
    seeded = {run(tiny_engine, request(prompt, 20, temperature=1.0, seed=3))[0].text for _ in range(3)}
    free = {run(tiny_engine, request(prompt, 20, temperature=1.0))[0].text for _ in range(3)}
    assert len(seeded) == 1
    assert len(free) == 3


@pytest.mark.model
@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
def test_smollm2_survives_preemption_and_chunking(mode: str, engine: LocalEngine, smollm2_reference: Any):
    """The embedded model under a pool of 40 blocks, where six long requests cannot run together."""
    block_bytes = engine.model_info().kv_bytes_per_token * 16
    config = engine.config
    prompts = [engine.tokenize(f"Story {i}: " + "the old mill by the river turned slowly. " * 12) for i in range(6)]
    tight = type(config)(
        dtype="float32",
        kv_cache_memory_bytes=40 * block_bytes,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        swap_space=0.25,
        preemption_mode=mode,
    )
    with LocalEngine(tight) as tight_engine:
        outputs = run(tight_engine, *(request(prompt, 40, ignore_eos=True) for prompt in prompts))
        stats = tight_engine.stats()
        assert stats.num_preemptions > 0
        assert (stats.num_preemptions_by_swap > 0) == (mode != "recompute")
        assert_at_rest(stats)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(smollm2_reference, prompt, token_ids(output))
