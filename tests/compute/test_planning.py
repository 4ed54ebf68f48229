"""Plans equal what is allocated, and the figures of well-known models."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILY_OPTIONS, LLAMA3_ROPE, write_gguf, write_hf_model
from torch import Tensor

from pagedllm.compute.models.config import ModelConfig, load_config_file, load_model_config
from pagedllm.compute.models.layers import allocate_weights
from pagedllm.compute.planning import (
    GPUMemory,
    MemoryPlan,
    activation_bytes,
    num_parameters,
    plan_memory,
    weights_bytes,
)
from pagedllm.config import EngineConfig, StepLimits
from pagedllm.errors import ConfigError
from pagedllm.files.locate import ModelFiles

GIB = 2**30
LLAMA_7B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
LLAMA_13B = LLAMA_7B | {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
}


@pytest.fixture
def shape(tmp_path: Path) -> Any:
    def read(values: dict[str, Any]) -> ModelConfig:
        path = tmp_path / "some config.json"
        path.write_text(json.dumps(values))
        return load_config_file(path)

    return read


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from tensors(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name))


def allocated_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    storages = {item.data_ptr(): item.untyped_storage().nbytes() for item in tensors(allocate_weights(model, dtype))}
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", FAMILY_OPTIONS)
def test_weights_are_those_that_are_allocated(family: str, tie: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """A bias or a norm of one family that was forgotten."""
    reference = write_hf_model(tmp_path, family, tie=tie)
    model = load_config_file(tmp_path / "config.json")
    assert weights_bytes(model, dtype) == allocated_bytes(model, dtype)
    assert num_parameters(model) == sum(parameter.numel() for parameter in reference.parameters())


def test_weights_of_a_gguf_file_with_rotary_factors(tmp_path: Path) -> None:
    reference = write_hf_model(tmp_path, "llama", rope=LLAMA3_ROPE)
    write_gguf(tmp_path / "m.gguf", reference)
    model = load_model_config(ModelFiles("m", "gguf", tmp_path / "m.gguf"))
    assert model.has_rope_freqs
    assert weights_bytes(model, torch.bfloat16) == allocated_bytes(model, torch.bfloat16)


@pytest.mark.parametrize(
    ("values", "parameters", "kv_bytes"),
    [(LLAMA_7B, 6_738_415_616, 524_288), (LLAMA_13B, 13_015_864_320, 819_200)],
)
def test_figures_of_the_literature(shape: Any, values: dict[str, Any], parameters: int, kv_bytes: int) -> None:
    """LLaMA in float16, as the papers count it."""
    gpu = GPUMemory(memory_bytes=80 * GIB, utilization=0.92)
    plan = plan_memory(shape(values), EngineConfig(), torch.float16, gpu=gpu)
    assert plan.num_parameters == parameters
    assert plan.kv_bytes_per_token == kv_bytes
    assert plan.block_bytes == 16 * kv_bytes
    # Norms are kept in float32.
    num_norms = (2 * values["num_hidden_layers"] + 1) * values["hidden_size"]
    assert plan.weights_bytes == 2 * parameters + 2 * num_norms + 4 * 64


def test_activations_by_hand(shape: Any) -> None:
    """The residual stream, what is added, its norm, gate, up and product; two rows of logits a sequence; rotations."""
    limits = StepLimits(max_num_batched_tokens=8192, max_num_seqs=256)
    per_token = 4 * 4096 + 2 * (2 * 4096 + 3 * 11008)
    expected = 8192 * per_token + 256 * 2 * 4 * 32000 + 4096 * 4 * 128
    assert activation_bytes(shape(LLAMA_7B), torch.float16, limits, max_model_len=4096) == expected
    wide_attention = LLAMA_7B | {"intermediate_size": 64}
    expected += 8192 * 2 * (5 * 4096 - 3 * 11008)
    assert activation_bytes(shape(wide_attention), torch.float16, limits, max_model_len=4096) == expected


def plan_7b(shape: Any, gib: float, *lengths: int, utilization: float = 0.9, **options: Any) -> MemoryPlan:
    gpu = GPUMemory(memory_bytes=int(gib * GIB), utilization=utilization)
    return plan_memory(shape(LLAMA_7B), EngineConfig(**options), torch.float16, gpu=gpu, lengths=lengths)


def test_the_parts_make_the_whole(shape: Any) -> None:
    plan = plan_7b(shape, 80)
    assert plan.usable_bytes == int(80 * GIB * 0.9)
    assert plan.weights_bytes + plan.activation_bytes + plan.pool_bytes == plan.usable_bytes
    assert plan.num_blocks == plan.pool_bytes // plan.block_bytes
    assert (plan.problems, plan.advice) == ((), ())
    assert [item.num_tokens for item in plan.sequences] == [256, 1024, 4096]


def test_paging_against_reservation(shape: Any) -> None:
    """What the longest sequence might need, reserved for each, is what paging saves."""
    plan = plan_7b(shape, 80, 100, 2000, 4096)
    short, middle, longest = plan.sequences
    assert short.num_blocks == 7
    assert short.num_paged == plan.num_blocks // 7
    assert short.num_reserved == middle.num_reserved == longest.num_reserved == longest.num_paged
    assert longest.num_paged == plan.num_blocks // 256
    assert short.unused_share_paged == pytest.approx(12 / 112)
    assert middle.unused_share_reserved == pytest.approx(2096 / 4096)


def amount(text: str) -> float:
    return float(text.split("take a GPU of ")[1].split(" GiB")[0])


def test_what_to_change_is_enough_and_not_too_much(shape: Any) -> None:
    """Advice that is followed must not lead to the same message again."""
    plan = plan_7b(shape, 16, max_model_len=4096)
    (problem,) = plan.problems
    assert problem.startswith(f"max_model_len=4096: lower it to {plan.fitting_model_len}, or take a GPU of")
    assert not plan_7b(shape, 16, max_model_len=plan.fitting_model_len).problems
    assert not plan_7b(shape, amount(problem), max_model_len=4096).problems
    assert plan_7b(shape, amount(problem) - 0.2, max_model_len=4096).problems

    (problem,) = plan_7b(shape, 12).problems
    assert "no room for a KV block of 8388608 bytes" in problem
    assert "max_num_batched_tokens" in problem
    assert not plan_7b(shape, amount(problem)).problems

    plan = plan_7b(shape, 80, 2000)
    (note,) = plan_7b(shape, 80, 2000, max_num_seqs=64).advice
    num_fitting = plan.sequences[0].num_paged
    assert f"{num_fitting} do: lower max_num_seqs to {num_fitting}, or" in note
    assert not plan_7b(shape, 80, 2000, max_num_seqs=num_fitting).advice
    assert not plan_7b(shape, amount(note), 2000, max_num_seqs=64).advice


def test_an_unset_length_is_lowered_as_by_the_engine(shape: Any) -> None:
    plan = plan_7b(shape, 16)
    assert not plan.problems
    assert plan.fitting_model_len < plan.max_model_len == 4096
    assert f"lowered from the model's 4096 to {plan.fitting_model_len}" in plan.advice[0]


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ((5000,), {}, r"seq_len=5000: must be in 1\.\.4096"),
        ((0,), {}, "seq_len=0"),
        ((2000,), {"max_model_len": 1000}, r"seq_len=2000: must be in 1\.\.1000"),
        ((), {"max_model_len": 5000}, "max_model_len=5000: the model's limit is 4096"),
    ],
)
def test_lengths_out_of_range(shape: Any, lengths: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_7b(shape, 80, *lengths, **options)
