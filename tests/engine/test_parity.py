"""The engine says what transformers says, for tiny random models from both file formats and for the embedded one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import assert_at_rest, request, run, token_ids
from reference import BFLOAT16_GAP, assert_greedy, whole_prompt
from tiny_models import write_gguf_llama, write_hf_llama

from pagedllm.compute.model_runner import ModelRunner
from pagedllm.config import EngineConfig
from pagedllm.files.locate import locate_model
from pagedllm.local import LocalEngine
from pagedllm.text.tokenizer import load_tokenizer

NUM_TOKENS = 24
SHAPES: dict[str, dict[str, Any]] = {
    "tied-gqa": {"num_heads": 4, "num_kv_heads": 2, "tie": True},
    "untied-mha": {"num_heads": 4, "num_kv_heads": 4, "tie": False},
    "one-kv-head": {"num_heads": 8, "num_kv_heads": 1, "tie": True},
    "llama3-rope": {"num_heads": 4, "num_kv_heads": 2, "tie": False, "rope_scaling": True},
    "sharded": {"num_heads": 4, "num_kv_heads": 2, "tie": False, "max_shard_size": "100KB"},
}


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = (1, 2, 15, 16, 17, 33, 70, 150)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def assert_parity(model_path: Path, reference: Any, **options: Any) -> None:
    """Mixed lengths in one batch, twice: the second time over cached prefixes."""
    config = EngineConfig(model=str(model_path), dtype="float32", **options)
    with LocalEngine(config) as engine:
        requests = prompts(engine.model_info().vocab_size)
        for _ in range(2):
            outputs = run(engine, *(request(prompt, NUM_TOKENS, ignore_eos=True) for prompt in requests))
            for prompt, output in zip(requests, outputs, strict=True):
                assert_greedy(reference, prompt, token_ids(output))
        assert outputs[-1].usage.cached_tokens == 144
        assert_at_rest(engine.stats())


@pytest.mark.parametrize("shape", SHAPES)
def test_safetensors(shape: str, tmp_path: Path):
    reference = write_hf_llama(tmp_path, **SHAPES[shape])
    if shape == "sharded":
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_parity(tmp_path, reference)


@pytest.mark.parametrize("shape", ["tied-gqa", "untied-mha", "llama3-rope"])
def test_gguf(shape: str, tmp_path: Path):
    model = write_hf_llama(tmp_path / "hf", **SHAPES[shape])
    write_gguf_llama(tmp_path / "model.gguf", model)
    assert_parity(tmp_path / "model.gguf", model)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"block_size": 1},
        {"block_size": 48},
        {"enable_prefix_caching": True, "max_num_seqs": 2, "max_num_batched_tokens": 2},
    ],
    ids=["chunks of 16", "blocks of 1", "blocks of 48", "two tokens a step"],
)
def test_odd_budgets_and_blocks(options: dict[str, Any], tmp_path: Path):
    reference = write_hf_llama(tmp_path)
    with LocalEngine(EngineConfig(model=str(tmp_path), dtype="float32", **options)) as engine:
        requests = prompts(engine.model_info().vocab_size)
        outputs = run(engine, *(request(prompt, NUM_TOKENS, ignore_eos=True) for prompt in requests))
    for prompt, output in zip(requests, outputs, strict=True):
        assert_greedy(reference, prompt, token_ids(output))


SMOLLM2_PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "1 2 3 4 5 6 7",
    "Once upon a time, in a village by the sea,",
    "Write a haiku about autumn.",
    "Zażółć gęślą jaźń 😀",
    "Q: What is paged attention?\nA:",
    "The recipe needs flour, sugar, butter and eggs. First, " * 6,
)


@pytest.mark.model
def test_smollm2_float32(engine: LocalEngine, smollm2_reference: Any):
    outputs = run(engine, *(request(prompt, 48, ignore_eos=True) for prompt in SMOLLM2_PROMPTS))
    num_compared = [
        assert_greedy(smollm2_reference, engine.tokenize(prompt), token_ids(output))
        for prompt, output in zip(SMOLLM2_PROMPTS, outputs, strict=True)
    ]
    assert sum(num_compared) > 300, "ties excuse more than they should"


@pytest.mark.model
def test_smollm2_bfloat16(smollm2_reference: Any):
    with LocalEngine(EngineConfig(dtype="bfloat16")) as engine:
        outputs = run(engine, *(request(prompt, 48, ignore_eos=True) for prompt in SMOLLM2_PROMPTS))
        num_compared = [
            assert_greedy(smollm2_reference, engine.tokenize(prompt), token_ids(output), near_tie=BFLOAT16_GAP)
            for prompt, output in zip(SMOLLM2_PROMPTS, outputs, strict=True)
        ]
    assert sum(num_compared) > 150, "near ties excuse more than they should"


@pytest.mark.model
@torch.inference_mode()
def test_smollm2_bfloat16_logits_are_as_good_as_torch_makes_them(smollm2_reference: Any):
    """The 2x rule: our error against float32 is at most twice that of transformers in the same precision."""
    in_bfloat16 = copy.deepcopy(smollm2_reference).to(torch.bfloat16)
    files = locate_model("smollm2-135m")
    runner, tokenizer = ModelRunner(EngineConfig(dtype="bfloat16"), files), load_tokenizer(files)
    for prompt in SMOLLM2_PROMPTS:
        token_ids = tokenizer.encode(prompt)
        expected = smollm2_reference(torch.tensor([token_ids])).logits[0]
        theirs = in_bfloat16(torch.tensor([token_ids])).logits[0] - expected
        ours = runner.run(whole_prompt(token_ids)) - expected
        assert ours.square().mean() <= 4 * theirs.square().mean()
