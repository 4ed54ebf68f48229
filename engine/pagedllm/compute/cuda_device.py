"""Which device computes, and moving a batch there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import ConfigError
from .forward_batch import ForwardBatch

__all__ = ["gpu_dtype", "move_batch", "resolve_device"]

logger = logging.getLogger(__name__)

_FIRST_WITH_BFLOAT16 = (8, 0)
_ALIGNMENT = 4  # numbers, of 4 bytes or more


def resolve_device(name: str, why_not_on: Callable[[torch.device], str | None]) -> torch.device:
    """The device that ``EngineConfig.device`` means; ``auto`` is the first GPU if there is one that can serve.

    Args:
        name: ``cpu``, ``cuda`` or ``auto``.
        why_not_on: Tells why a GPU cannot serve; None if it can. Asked for ``auto`` only: who names a GPU gets it, or
            the error of what does not run there.

    Raises:
        ConfigError: ``cuda``, and there is none.
    """
    if name == "cpu":
        return torch.device("cpu")
    gpu = torch.device("cuda", 0)
    if not torch.cuda.is_available():
        reason = "torch finds no GPU" if torch.backends.cuda.is_built() else "this torch is built without CUDA"
        if name == "cuda":
            raise ConfigError.for_value("device", name, f"{reason}; use cpu or auto")
        logger.info("the CPU computes: %s", reason)
        return torch.device("cpu")
    unfit = why_not_on(gpu) if name == "auto" else None
    if unfit is None:
        return gpu
    logger.warning("the CPU computes, though there is a GPU: %s", unfit)
    return torch.device("cpu")


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
    # Each begins at a multiple of 16 bytes, whatever the sizes: for others Triton would compile every kernel again.
    padded = [tensor.numel() + -tensor.numel() % _ALIGNMENT for tensor in tensors]
    packed = tensors[0].new_zeros(sum(padded), pin_memory=device.type == "cuda")
    for part, tensor in zip(packed.split(padded), tensors, strict=True):
        part[: tensor.numel()] = tensor.flatten()
    moved = packed.to(device, non_blocking=True).split(padded)
    return [part[: tensor.numel()].view(tensor.shape) for part, tensor in zip(moved, tensors, strict=True)]
