"""Which device computes, and moving a batch there."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import ConfigError
from .forward_batch import ForwardBatch

__all__ = ["gpu_dtype", "move_batch", "resolve_device"]

_FIRST_WITH_BFLOAT16 = (8, 0)


def resolve_device(name: str) -> torch.device:
    """The device that ``EngineConfig.device`` means; ``auto`` is the first GPU where torch finds one.

    Raises:
        ConfigError: ``cuda``, and there is none.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        reason = "torch finds no GPU" if torch.backends.cuda.is_built() else "this torch is built without CUDA"
        raise ConfigError.for_value("device", name, f"{reason}; use cpu or auto")
    return torch.device("cuda", 0)


def gpu_dtype(device: torch.device) -> torch.dtype:
    """What ``dtype="auto"`` means on a GPU: bfloat16, or float16 before compute capability 8.0."""
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= _FIRST_WITH_BFLOAT16 else torch.float16


def move_batch(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    """The batch on the device: one copy for each of its two dtypes, which the CPU does not wait for.

    The pinned memory behind the copies goes back to torch's allocator, which reuses it only when they are done.
    """
    input_ids, positions, slots, rows = _move(
        [batch.input_ids, batch.positions, batch.slot_mapping, batch.logits_indices], device
    )
    tables, cu_seqlens_q, seq_lens = _move([batch.block_tables, batch.cu_seqlens_q, batch.seq_lens], device)
    return replace(
        batch,
        input_ids=input_ids,
        positions=positions,
        slot_mapping=slots,
        logits_indices=rows,
        block_tables=tables,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
    )


def _move(tensors: List[Tensor], device: torch.device) -> list[Tensor]:
    packed = torch.cat([tensor.flatten() for tensor in tensors])
    if device.type == "cuda":
        packed = packed.pin_memory()
    moved = packed.to(device, non_blocking=True).split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(moved, tensors, strict=True)]
