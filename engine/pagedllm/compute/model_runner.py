"""The loaded model on its device: weights, KV cache, and the forward pass."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pagedllm_kernels.interface import CopyKernels, Kernels, KernelsUnavailableError
from pagedllm_kernels.registry import KERNELS, select_kernels

from ..config import EngineConfig, StepLimits
from ..control.host_tier import BlockCopy
from ..errors import ConfigError
from ..files.locate import ModelFiles
from .cuda_device import gpu_dtype, move_batch, resolve_device
from .cuda_graphs import DecodeGraphs, cuda_capture
from .cuda_memory import check_pool, measure_pool_bytes
from .cuda_swap import StagedHostCache, make_staged_host_cache
from .forward_batch import ForwardBatch
from .host_cache import HostCache
from .kv_cache import KVCache, kv_bytes_per_token
from .memory import PoolSize, fit_limits, fit_limits_to_gpu, num_host_blocks, plan_pool, wanted_model_len
from .models.config import ModelConfig, load_model_config
from .models.decoder import Decoder
from .models.layers import allocate_weights, weight_slots
from .weights import iter_weights

__all__ = ["ModelRunner"]

logger = logging.getLogger(__name__)


class ModelRunner:
    """Runs forward batches. Owned by one thread.

    Args:
        config: The engine's configuration.
        files: The model.
        wrap_kernels: Puts something around the kernels that were chosen, such as a clock.
        weights: Yields the tensors of ``files`` as ``iter_weights`` does; anything else is for benchmarks.

    Raises:
        ModelLoadError: The model cannot be used.
        ConfigError: The configuration does not fit the model or the machine.
    """

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        *,
        weights: Callable[[ModelFiles, ModelConfig], Iterator[tuple[str, Tensor]]] = iter_weights,
        wrap_kernels: Callable[[Kernels], Kernels] | None = None,
    ) -> None:
        start = time.monotonic()
        self.model_config: ModelConfig = load_model_config(files)
        self.device = resolve_device(config.device, partial(_why_not_on, config, self.model_config))
        if config.gpu_memory_utilization is not None and self.device.type == "cpu":
            raise ConfigError.for_value(
                "gpu_memory_utilization", config.gpu_memory_utilization, "must be None on a CPU"
            )
        self.dtype = resolve_dtype(config.dtype, self.device)
        self.bytes_per_token = kv_bytes_per_token(self.model_config, self.dtype)
        self._iter_weights = weights
        kernels = _select_kernels(config.kernels, self.dtype, self.model_config, self.device)
        self.kernels = kernels if wrap_kernels is None else wrap_kernels(kernels)
        self._graphs: DecodeGraphs | None = None
        if self.device.type == "cpu":
            self._make_pool(config, config.step_limits("cpu"))
            self.decoder = self._load(files, self.pool_size.max_model_len)
        else:
            self._load_on_gpu(config, files)
        self.num_host_blocks = num_host_blocks(config, self.bytes_per_token)
        # Plain torch on a GPU, which is for comparison, waits for each copy.
        self._host_cache: HostCache | StagedHostCache = (
            make_staged_host_cache(self.kv_cache, self.num_host_blocks, kernels, self.device)
            if isinstance(kernels, CopyKernels)
            else HostCache(self.kv_cache, self.num_host_blocks)
        )
        self.copy_bytes_per_s = self._host_cache.measure_copy_rate() if self.num_host_blocks else None
        logger.info("loaded %s as %s in %.1f s", files.name, config.dtype, time.monotonic() - start)

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> Tensor:
        """One forward pass: [num_sampled, vocab_size] float32 logits, valid until the next one."""
        if self.device.type != "cpu":
            batch = move_batch(batch, self.device)
        if self._graphs is not None and self._graphs.fits(batch):
            return self._graphs.run(batch)
        return self.decoder.forward(batch, self.kv_cache)

    @torch.inference_mode()
    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy KV blocks within the device and between device and host, in this order; before ``run``.

        On a GPU copies to the host may go on while the step computes.
        """
        self._host_cache.copy(copies)

    def _make_pool(self, config: EngineConfig, limits: StepLimits) -> None:
        """The KV cache, and what a step may hold with it."""
        model_max_len = self.model_config.max_position_embeddings
        self.pool_size: PoolSize = plan_pool(
            config, limits, bytes_per_token=self.bytes_per_token, model_max_len=model_max_len
        )
        self.limits: StepLimits = fit_limits(config, limits, self.pool_size.num_blocks)
        default = config.step_limits(self.device.type)
        if self.limits != default:
            logger.info(
                "max_num_seqs and max_num_batched_tokens lowered from %d and %d to %d and %d by the memory there is",
                default.max_num_seqs, default.max_num_batched_tokens,
                self.limits.max_num_seqs, self.limits.max_num_batched_tokens,
            )  # fmt: skip
        self.kv_cache = self._new_cache(self.pool_size.num_blocks, config.block_size)

    def _new_cache(self, num_blocks: int, block_size: int) -> KVCache:
        return KVCache(
            self.model_config, num_blocks=num_blocks, block_size=block_size, dtype=self.dtype, device=self.device
        )

    @torch.inference_mode()
    def _load_on_gpu(self, config: EngineConfig, files: ModelFiles) -> None:
        """Weights first, then a pool of what they and the largest step leave, then graphs over it."""
        max_model_len = wanted_model_len(config, self.model_config.max_position_embeddings)
        self.decoder = self._load(files, max_model_len)
        limits = config.step_limits("cuda")
        if config.kv_cache_memory_bytes is None:
            block_bytes = self.bytes_per_token * config.block_size
            forward = partial(self.decoder.forward, kv_cache=self._new_cache(1, config.block_size))
            limits, size = fit_limits_to_gpu(
                config,
                lambda limits: measure_pool_bytes(forward, config, limits, max_model_len, self.device),
                block_bytes=block_bytes,
            )
            check_pool(config, size, block_bytes=block_bytes)
            self._make_pool(replace(config, kv_cache_memory_bytes=size), limits)
        else:
            self._make_pool(config, limits)
        if not config.enforce_eager:
            self._graphs = DecodeGraphs(
                partial(self.decoder.forward, kv_cache=self.kv_cache),
                cuda_capture(),
                max_num_seqs=self.limits.max_num_seqs,
                max_num_blocks=-(-self.pool_size.max_model_len // config.block_size),
                device=self.device,
            )

    def _load(self, files: ModelFiles, max_model_len: int) -> Decoder:
        with self.device:  # where weights and tables are made
            weights = allocate_weights(self.model_config, self.dtype)
            slots = weight_slots(self.model_config, weights)
            for name, tensor in self._iter_weights(files, self.model_config):
                slots[name].copy_(tensor)
            return Decoder(self.model_config, weights, self.kernels, max_model_len=max_model_len)


def _why_not_on(config: EngineConfig, model: ModelConfig, device: torch.device) -> str | None:
    """Why the model cannot run on a device as it was asked for; None if it can."""
    try:
        _select_kernels(config.kernels, resolve_dtype(config.dtype, device), model, device)
    except ConfigError as error:
        return str(error)
    return None


def _select_kernels(name: str, dtype: torch.dtype, config: ModelConfig, device: torch.device) -> Kernels:
    if name == "auto":
        name = os.environ.get("PAGEDLLM_KERNELS") or "auto"
    if name not in KERNELS:
        raise ConfigError.for_value("PAGEDLLM_KERNELS", name, f"must be one of {', '.join(KERNELS)}")
    try:
        return select_kernels(
            name,
            dtype,
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            device=device,
        )
    except KernelsUnavailableError as error:
        raise ConfigError(str(error)) from error


def resolve_dtype(name: str, device: torch.device | None = None) -> torch.dtype:
    """The dtype of weights and KV; ``auto`` is bfloat16 only where the device multiplies it. None: a CPU."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device is not None and device.type == "cuda":
        return gpu_dtype(device)
    return torch.bfloat16 if _has_native_bfloat16() else torch.float32


def _has_native_bfloat16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return any(f" {flag} " in flags or f" {flag}\n" in flags for flag in ("avx512_bf16", "amx_bf16", "bf16"))
