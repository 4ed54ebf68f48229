"""What a GPU has left for the KV pool, found by running the largest step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..config import DEFAULT_GPU_MEMORY_UTILIZATION, EngineConfig, StepLimits
from ..errors import ConfigError
from .forward_batch import ForwardBatch
from .memory import gpu_pool_bytes

__all__ = ["check_pool", "largest_batch", "measure_pool_bytes"]

_MIB = 2**20


def largest_batch(limits: StepLimits, max_model_len: int, block_size: int, device: torch.device) -> ForwardBatch:
    """As many tokens and rows of logits as a step may have; it stores nothing, and sees block 0 again and again."""
    num_seqs = limits.max_num_seqs
    shares = [limits.max_num_batched_tokens // num_seqs] * num_seqs
    shares[0] += limits.max_num_batched_tokens - sum(shares)
    lens = torch.tensor([min(share, max_model_len) for share in shares], dtype=torch.int32)
    bounds = torch.cat((lens.new_zeros(1), lens.cumsum(0).int()))
    num_tokens = int(bounds[-1])
    positions = torch.arange(num_tokens) - bounds[:-1].long().repeat_interleave(lens.long())
    return ForwardBatch(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=positions.to(device),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        block_tables=torch.zeros(num_seqs, -(-int(lens.max()) // block_size), dtype=torch.int32, device=device),
        cu_seqlens_q=bounds.to(device),
        seq_lens=lens.to(device),
        logits_indices=bounds[1:].long().to(device) - 1,
    )


def measure_pool_bytes(
    forward: Callable[[ForwardBatch], Tensor],
    config: EngineConfig,
    limits: StepLimits,
    max_model_len: int,
    device: torch.device,
) -> int:
    """Run the largest step and count what it took at its peak; what ``gpu_pool_bytes`` then leaves, in bytes.

    Where the memory does not even hold the step, that is below 0.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    weights = torch.cuda.memory_allocated(device)
    try:
        # Sampling changes a copy of the logits.
        forward(largest_batch(limits, max_model_len, config.block_size, device)).clone()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
    except torch.OutOfMemoryError:
        peak = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return gpu_pool_bytes(
        memory_bytes=total,
        utilization=config.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION,
        weights_bytes=weights,
        activation_bytes=peak - weights,
        others_bytes=total - free - torch.cuda.memory_reserved(device),
    )


def check_pool(config: EngineConfig, size: int, *, block_bytes: int) -> None:
    """Refuse a GPU that has no room for KV.

    Args:
        config: What was asked for.
        size: Of the pool, in bytes; maybe below 0.
        block_bytes: Of a KV block.

    Raises:
        ConfigError: Telling what is missing, and what to change.
    """
    if size < block_bytes:
        raise ConfigError.for_value(
            "gpu_memory_utilization",
            config.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION,
            f"weights, the largest step and others leave {size // _MIB} MiB of it for the KV pool, and a block takes "
            f"{block_bytes} bytes: raise it, lower max_num_batched_tokens or max_num_seqs, or take a smaller model",
        )
