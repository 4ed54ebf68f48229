"""The whole engine on the GPU's kernels, in Triton's interpreter: the same answers as on the CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_helpers import assert_at_rest, request, run, token_ids
from tiny_models import write_hf_model
from torch import Tensor

from pagedllm.config import EngineConfig
from pagedllm.errors import ConfigError
from pagedllm.local import LocalEngine
from pagedllm_kernels.interface import KernelsUnavailableError
from pagedllm_kernels.reference import ReferenceKernels
from pagedllm_kernels.registry import select_kernels
from pagedllm_kernels.triton.kernels import TritonKernels

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

SHAPE = {"head_dim": 16, "hidden_size": 64, "intermediate_size": 128}
PROMPTS = (
    "the cache holds the keys and the values",
    "a block is shared",
    "the cache holds the keys and no blocks 0 1 2",
)


def answers(config: EngineConfig) -> list[list[int]]:
    """Greedy and sampled texts, in chunks, with a shared prefix, then again from the prefix cache."""
    with LocalEngine(config) as engine:
        greedy = [request(prompt, 5) for prompt in PROMPTS]
        sampled = [request(prompt, 5, temperature=0.8, seed=7, top_p=0.9) for prompt in PROMPTS]
        first = run(engine, *greedy, *sampled)
        again = run(engine, *(request(prompt, 5) for prompt in PROMPTS))
        assert again[0].usage.cached_tokens > 0
        assert_at_rest(engine.stats())
    return [token_ids(output) for output in (*first, *again)]


@pytest.mark.parametrize("family", ["qwen3", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_same_tokens_as_on_the_cpu(family: str, tmp_path: Path):
    """Norms of heads, windows and soft caps, chunked prefill beside decode, and cached prefixes."""
    write_hf_model(tmp_path, family, num_layers=2)
    options = {"dtype": "float32", "max_num_batched_tokens": 24, "max_num_seqs": 4, "block_size": 4}
    config = {"model": str(tmp_path), "kv_cache_memory_bytes": 2**18, **options}
    assert answers(EngineConfig(**config, kernels="triton")) == answers(EngineConfig(**config, kernels="reference"))


def test_same_tokens_after_a_stay_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Gather, staging and scatter, as a GPU would do them, with blocks in an order of their own."""
    write_hf_model(tmp_path, "qwen3", num_layers=2)
    staged: list[int] = []
    copy_blocks = TritonKernels.copy_blocks

    def count(kernels: TritonKernels, source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
        staged.append(len(source_ids))
        copy_blocks(kernels, source, target, source_ids, target_ids)

    monkeypatch.setattr(TritonKernels, "copy_blocks", count)
    options = {"dtype": "float32", "max_num_batched_tokens": 24, "max_num_seqs": 4, "block_size": 4}
    config = {"model": str(tmp_path), "swap_space": 0.001, "preemption_mode": "swap", **options}
    requests = [request(prompt, 8) for prompt in PROMPTS]
    with LocalEngine(EngineConfig(**config, kernels="reference")) as engine:
        expected = [token_ids(output) for output in run(engine, *requests)]
        pool_bytes = 9 * 4 * engine.model_info().kv_bytes_per_token
    pool = {"max_model_len": 32, "kv_cache_memory_bytes": pool_bytes}
    with LocalEngine(EngineConfig(**config, **pool, kernels="triton")) as engine:
        assert [token_ids(output) for output in run(engine, *requests)] == expected
        stats = engine.stats()
        assert_at_rest(stats)
    assert stats.num_preemptions_by_swap > 0
    assert stats.num_swapped_in_blocks > 0
    assert sum(staged) >= stats.num_swapped_in_blocks + stats.num_swapped_out_blocks


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said_clearly(tmp_path: Path):
    """Something from the depths of torch, after the weights are loaded."""
    write_hf_model(tmp_path, "llama", num_layers=1)
    with pytest.raises(ConfigError, match=r"device='cuda': (torch finds no GPU|this torch is built without CUDA)"):
        LocalEngine(EngineConfig(model=str(tmp_path), device="cuda"))
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0\.5: must be None on a CPU"):
        LocalEngine(EngineConfig(model=str(tmp_path), gpu_memory_utilization=0.5))


def test_a_gpu_gets_triton_or_an_error(monkeypatch: pytest.MonkeyPatch):
    """Kernels for a CPU that are handed pointers to a GPU's memory end the process."""
    cuda = torch.device("cuda")
    monkeypatch.setattr(TritonKernels, "failure", lambda device: None)
    assert select_kernels("auto", torch.bfloat16, device=cuda, **SHAPE).name == "triton"
    with pytest.raises(KernelsUnavailableError, match="kernels='cpu': they compute on the CPU"):
        select_kernels("cpu", torch.float32, device=cuda, **SHAPE)
    assert isinstance(select_kernels("reference", torch.float32, device=cuda, **SHAPE), ReferenceKernels)
    monkeypatch.setattr(TritonKernels, "failure", lambda device: "a trial on cuda failed: no compiler")
    with pytest.raises(KernelsUnavailableError, match="kernels='triton': a trial on cuda failed: no compiler"):
        select_kernels("auto", torch.bfloat16, device=cuda, **SHAPE)


@pytest.mark.parametrize(
    ("dtype", "device", "head_dim", "reason"),
    [
        (torch.float64, "cuda", 64, "float64"),
        (torch.float16, "cuda", 512, "head_dim=512"),
        (torch.bfloat16, "cpu", 64, "bfloat16"),
        (torch.float32, "cpu", 64, None),
    ],
)
def test_models_that_do_not_fit_are_refused_by_name(dtype: torch.dtype, device: str, head_dim: int, reason: str | None):
    refusal = TritonKernels.refusal(dtype, device=torch.device(device), head_dim=head_dim)
    assert refusal is None if reason is None else reason in str(refusal)
