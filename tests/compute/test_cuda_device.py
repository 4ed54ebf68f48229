"""Which device serves, and what its memory leaves for KV, with a stand-in for torch's view of a GPU."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace

import pytest
import torch
from tiny_models import write_hf_llama
from torch import Tensor

from pagedllm.compute.cuda_device import resolve_device
from pagedllm.compute.cuda_memory import check_pool, measure_pool_bytes
from pagedllm.compute.forward_batch import ForwardBatch
from pagedllm.compute.memory import fit_limits_to_gpu, plan_pool
from pagedllm.compute.model_runner import _why_not_on
from pagedllm.compute.models.config import ModelConfig, load_config_file
from pagedllm.compute.planning import GPUMemory, activation_bytes, plan_memory, weights_bytes
from pagedllm.config import EngineConfig, StepLimits
from pagedllm.errors import ConfigError
from pagedllm_kernels.triton import kernels as triton_kernels
from pagedllm_kernels.triton.kernels import TritonKernels

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MIB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("model")
    write_hf_llama(folder, num_layers=2)
    return load_config_file(folder / "config.json")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU as torch sees it, on which small kernels run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(TritonKernels, "failure", lambda device: None)


def resolve(config: EngineConfig, model: ModelConfig) -> torch.device:
    return resolve_device(config.device, lambda device: _why_not_on(config, model, device))


@pytest.mark.usefixtures("gpu")
def test_auto_takes_a_gpu_that_can_serve(model: ModelConfig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PAGEDLLM_KERNELS", raising=False)
    for options in ({}, {"kernels": "triton"}, {"kernels": "reference"}, {"dtype": "float32"}):
        assert resolve(EngineConfig(**options), model) == GPU
    assert resolve(EngineConfig(device="cpu"), model) == CPU


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("options", "changes", "reason"),
    [
        ({"kernels": "cpu"}, {}, "they compute on the CPU"),
        ({}, {"head_dim": 512}, "head_dim=512"),
        ({"kernels": "triton"}, {"head_dim": 33}, "head_dim=33 is odd"),
    ],
)
def test_auto_says_why_a_gpu_cannot_serve(
    options: dict[str, str],
    changes: dict[str, int],
    reason: str,
    model: ModelConfig,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    """An engine that fails where it could compute, if slower; or is slow and nobody knows why."""
    monkeypatch.delenv("PAGEDLLM_KERNELS", raising=False)
    other = dataclasses.replace(model, **changes)
    with caplog.at_level(logging.WARNING, "pagedllm"):
        assert resolve(EngineConfig(**options), other) == CPU
    assert "the CPU computes, though there is a GPU" in caplog.text
    assert reason in caplog.text
    # Who names the device gets it, and then the error of what does not run there.
    assert resolve(EngineConfig(**options, device="cuda"), other) == GPU


@pytest.mark.usefixtures("gpu")
def test_a_gpu_on_which_no_kernel_runs_is_left_alone(
    model: ModelConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """No C compiler, a driver that is too old: known only when a kernel is to run, which was in the first request."""
    monkeypatch.undo()
    monkeypatch.delenv("PAGEDLLM_KERNELS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def fail(*args: object, **options: object) -> Tensor:
        raise RuntimeError("Failed to find C compiler.\nPlease set CC")

    monkeypatch.setattr(triton_kernels, "gated_activation", fail)
    monkeypatch.setattr(triton_kernels.torch, "zeros", lambda *args, **options: None)
    assert resolve(EngineConfig(), model) == CPU
    assert "a trial on cuda:0 failed: Failed to find C compiler." in caplog.text


def test_no_gpu_is_no_reason_to_worry(model: ModelConfig, caplog: pytest.LogCaptureFixture, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.INFO, "pagedllm"):
        assert resolve(EngineConfig(), model) == CPU
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "the CPU computes: " in caplog.text
    with pytest.raises(ConfigError, match="device='cuda'"):
        resolve(EngineConfig(device="cuda"), model)


class FakeGPU:
    """``torch.cuda``'s counters for a device with so much memory, of which others hold a part."""

    def __init__(self, total: int, weights: int, others: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total, self.weights, self.others = total, weights, others
        self.peak = 0
        for name in ("synchronize", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda device: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.weights)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.weights)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - weights - others, total))
        properties = SimpleNamespace(total_memory=total)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def compute(self, activations: int) -> Tensor:
        self.peak = self.weights + activations
        if self.peak + self.others > self.total:
            raise torch.OutOfMemoryError
        return torch.zeros(1)


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 300}, {"max_num_batched_tokens": 700}])
@pytest.mark.parametrize("mib", [2, 5, 12, 40, 400])
def test_an_engine_gets_what_was_planned(
    mib: int, options: dict[str, int], model: ModelConfig, monkeypatch: pytest.MonkeyPatch
):
    """Two computations of one thing part company: where a step takes what was estimated, a start is as planned."""
    config = EngineConfig(**options, block_size=16)
    plan = plan_memory(
        model, config, torch.float32, gpu=GPUMemory(memory_bytes=mib * MIB, utilization=0.9), lengths=[64]
    )
    fake = FakeGPU(mib * MIB, weights_bytes(model, torch.float32), 0, monkeypatch)
    max_model_len = model.max_position_embeddings
    used: list[StepLimits] = []

    def forward(batch: ForwardBatch) -> Tensor:
        found = StepLimits(max_num_seqs=len(batch.seq_lens), max_num_batched_tokens=used[-1].max_num_batched_tokens)
        return fake.compute(activation_bytes(model, torch.float32, found, max_model_len=max_model_len))

    def measure(limits: StepLimits) -> int:
        used.append(limits)
        return measure_pool_bytes(forward, config, limits, max_model_len, CPU)

    _, size = fit_limits_to_gpu(config, measure, block_bytes=plan.block_bytes)
    if plan.problems:
        with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0\.9: .*largest step and others leave"):
            check_pool(config, size, block_bytes=plan.block_bytes)
        return
    assert size == plan.pool_bytes
    pool = plan_pool(
        dataclasses.replace(config, kv_cache_memory_bytes=size), used[-1],
        bytes_per_token=plan.kv_bytes_per_token, model_max_len=max_model_len,
    )  # fmt: skip
    assert (pool.num_blocks, pool.max_model_len) == (plan.num_blocks, plan.fitting_model_len)


def test_what_others_hold_is_not_ours(monkeypatch: pytest.MonkeyPatch):
    fake = FakeGPU(1000, 300, 150, monkeypatch)
    config, limits = EngineConfig(gpu_memory_utilization=0.8), StepLimits(max_num_seqs=1, max_num_batched_tokens=1)
    assert measure_pool_bytes(lambda batch: fake.compute(100), config, limits, 8, CPU) == 800 - 300 - 100 - 150
    assert measure_pool_bytes(lambda batch: fake.compute(900), config, limits, 8, CPU) < 0
