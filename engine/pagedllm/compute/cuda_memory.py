"""What a GPU has left for the KV pool, found by running the largest step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..config import EngineConfig
from ..errors import ConfigError
from .forward_batch import ForwardBatch

__all__ = ["DEFAULT_UTILIZATION", "largest_batch", "measure_pool_bytes", "pool_bytes_left"]

DEFAULT_UTILIZATION = 0.9
_MIB = 2**20


def largest_batch(config: EngineConfig, max_model_len: int, device: torch.device) -> ForwardBatch:
    """As many tokens and rows of logits as a step may have; it stores nothing, and sees block 0 again and again."""
    num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
    shares = [config.max_num_batched_tokens // num_seqs] * num_seqs
    shares[0] += config.max_num_batched_tokens - sum(shares)
    lens = torch.tensor([min(share, max_model_len) for share in shares], dtype=torch.int32)
    bounds = torch.cat((lens.new_zeros(1), lens.cumsum(0).int()))
    num_tokens = int(bounds[-1])
    positions = torch.arange(num_tokens) - bounds[:-1].long().repeat_interleave(lens.long())
    return ForwardBatch(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=positions.to(device),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        block_tables=torch.zeros(num_seqs, -(-int(lens.max()) // config.block_size), dtype=torch.int32, device=device),
        cu_seqlens_q=bounds.to(device),
        seq_lens=lens.to(device),
        logits_indices=bounds[1:].long().to(device) - 1,
    )


def measure_pool_bytes(
    forward: Callable[[ForwardBatch], Tensor], config: EngineConfig, max_model_len: int, device: torch.device
) -> int:
    """Run the largest step and count what it took at its peak, weights included.

    Raises:
        ConfigError: Weights and activations leave nothing of ``gpu_memory_utilization``.
    """
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    forward(largest_batch(config, max_model_len, device))
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # The driver's share and that of other processes.
    others = total - free - torch.cuda.memory_reserved(device)
    return pool_bytes_left(
        total=total, peak=peak, others=others, utilization=config.gpu_memory_utilization or DEFAULT_UTILIZATION
    )


def pool_bytes_left(*, total: int, peak: int, others: int, utilization: float) -> int:
    """``utilization`` of all memory, less what others have and what the largest step needs; in bytes.

    Raises:
        ConfigError: Nothing is left.
    """
    left = int(total * utilization) - others - peak
    if left <= 0:
        raise ConfigError.for_value(
            "gpu_memory_utilization",
            utilization,
            f"of {total // _MIB} MiB others hold {others // _MIB}, and weights and activations need {peak // _MIB}: "
            "nothing is left for the KV pool; raise it, or lower max_num_batched_tokens",
        )
    return left
