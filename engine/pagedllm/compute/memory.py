"""How much memory the engine may take, and what the KV pool gets of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..config import EngineConfig, StepLimits
from ..errors import ConfigError

__all__ = [
    "PoolSize",
    "available_memory_bytes",
    "fit_limits",
    "fit_limits_to_gpu",
    "gpu_pool_bytes",
    "num_blocks_for",
    "num_host_blocks",
    "plan_pool",
    "pool_bytes",
    "wanted_model_len",
]

logger = logging.getLogger(__name__)

_DEFAULT_POOL_BYTES = 512 * 2**20
_DEFAULT_POOL_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class PoolSize:
    """The KV pool and the longest sequence that it allows."""

    num_blocks: int
    max_model_len: int


def available_memory_bytes() -> int:
    """Memory that this process may still take: what the system has free, within its control group's limit."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        available = min(available, int(limit) - int(used))
    return max(available, 0)


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold the KV of so many tokens."""
    return -(-num_tokens // block_size)


def pool_bytes(config: EngineConfig, limits: StepLimits, *, bytes_per_token: int, max_model_len: int) -> int:
    """Bytes of the KV pool on a CPU: what was asked for, else the least of three limits.

    Args:
        config: What was asked for.
        limits: Of a step.
        bytes_per_token: Of the KV cache, over all layers.
        max_model_len: Longest sequence, in tokens.
    """
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    sequence_bytes = num_blocks_for(max_model_len, config.block_size) * config.block_size * bytes_per_token
    return min(
        int(available_memory_bytes() * _DEFAULT_POOL_SHARE), _DEFAULT_POOL_BYTES, limits.max_num_seqs * sequence_bytes
    )


def gpu_pool_bytes(
    *, memory_bytes: int, utilization: float, weights_bytes: int, activation_bytes: int, others_bytes: int = 0
) -> int:
    """Bytes that a GPU has for the KV pool; negative by what weights and activations lack.

    Args:
        memory_bytes: Of the whole device.
        utilization: Share of it that may be in use, 0 to 1. CUDA graphs and staging buffers come out of the rest.
        weights_bytes: All of them.
        activation_bytes: Most that one step takes besides.
        others_bytes: What the driver and other processes hold; a plan knows of none.
    """
    return int(memory_bytes * utilization) - weights_bytes - activation_bytes - others_bytes


def fit_limits_to_gpu(
    config: EngineConfig, measure: Callable[[StepLimits], int], *, block_bytes: int
) -> tuple[StepLimits, int]:
    """The largest limits that leave room for a KV pool that holds them, and that pool's bytes.

    Limits that were not asked for are halved, down to those of a CPU: what a large step takes for activations is lost
    to the pool, and without KV for its tokens no step is that large.

    Args:
        config: What was asked for.
        measure: Bytes of the pool, by limits; the engine measures, a plan estimates.
        block_bytes: Of a KV block.
    """
    limits, least = config.step_limits("cuda"), config.step_limits("cpu")
    while True:
        size = measure(limits)
        lower = config.lower_limits(
            limits,
            max_num_seqs=max(limits.max_num_seqs // 2, least.max_num_seqs),
            max_num_batched_tokens=max(limits.max_num_batched_tokens // 2, least.max_num_batched_tokens),
        )
        if fit_limits(config, limits, max(size, 0) // block_bytes) == limits or lower == limits:
            return limits, size
        limits = lower


def fit_limits(config: EngineConfig, limits: StepLimits, num_blocks: int) -> StepLimits:
    """Limits that a pool can reach: a sequence has a block of its own, and a new token a slot.

    What was asked for stays as it is; steps are then smaller than it allows.
    """
    return config.lower_limits(limits, max_num_seqs=num_blocks, max_num_batched_tokens=num_blocks * config.block_size)


def plan_pool(config: EngineConfig, limits: StepLimits, *, bytes_per_token: int, model_max_len: int) -> PoolSize:
    """Size the KV pool and fit ``max_model_len`` to it.

    Args:
        config: What was asked for.
        limits: Of a step.
        bytes_per_token: Of the KV cache, over all layers.
        model_max_len: The model's own limit in tokens.

    Raises:
        ConfigError: ``max_model_len`` is above the model's limit or does not fit the pool; the message names the
            largest that does. Or the pool does not hold a single block.
    """
    wanted_len = wanted_model_len(config, model_max_len)
    block_bytes = bytes_per_token * config.block_size
    size = pool_bytes(config, limits, bytes_per_token=bytes_per_token, max_model_len=wanted_len)
    num_blocks = size // block_bytes
    if num_blocks < 1:
        raise ConfigError.for_value(
            "kv_cache_memory_bytes", size, f"must hold at least one block of {block_bytes} bytes"
        )
    fitting_len = min(wanted_len, num_blocks * config.block_size)
    if fitting_len < wanted_len:
        if config.max_model_len is not None:
            needed = num_blocks_for(wanted_len, config.block_size) * block_bytes
            raise ConfigError.for_value(
                "max_model_len",
                wanted_len,
                f"the KV pool of {num_blocks} blocks holds {fitting_len} tokens; lower it to that or raise "
                f"kv_cache_memory_bytes to {needed}",
            )
        logger.warning(
            "max_model_len lowered from %d to %d, which is what the KV pool of %d blocks holds; "
            "raise kv_cache_memory_bytes (now %d) for longer sequences",
            wanted_len, fitting_len, num_blocks, size,
        )  # fmt: skip
    return PoolSize(num_blocks=num_blocks, max_model_len=fitting_len)


def num_host_blocks(config: EngineConfig, bytes_per_token: int) -> int:
    """Blocks in ``swap_space``.

    Raises:
        ConfigError: It is more than the machine has, or does not hold a single block.
    """
    wanted = int(config.swap_space * 2**30)
    available = available_memory_bytes()
    if wanted > available:
        allowed = f"is more than the {available / 2**30:.1f} GiB of memory that are available"
        raise ConfigError.for_value("swap_space", config.swap_space, allowed)
    num_blocks = wanted // (bytes_per_token * config.block_size)
    if wanted and not num_blocks:
        allowed = f"must hold at least one block of {bytes_per_token * config.block_size} bytes"
        raise ConfigError.for_value("swap_space", config.swap_space, allowed)
    return num_blocks


def wanted_model_len(config: EngineConfig, model_max_len: int) -> int:
    """The longest sequence that was asked for, else the model's own limit.

    Raises:
        ConfigError: It is above the model's limit.
    """
    wanted_len = config.max_model_len or model_max_len
    if wanted_len > model_max_len:
        raise ConfigError.for_value("max_model_len", wanted_len, f"the model's limit is {model_max_len}")
    return wanted_len


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
