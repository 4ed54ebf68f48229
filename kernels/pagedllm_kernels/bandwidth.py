"""Reading memory as fast as it goes: what decoding is bound by."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["make_buffer", "readers"]


def make_buffer(num_bytes: int) -> Tensor:
    """Memory to read, [num_bytes / 4] float32, written once and in large pages where the system has them."""
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).fill_(1.0)


def readers() -> dict[str, Callable[[Tensor], object]]:
    """Functions that read a buffer once, by name. No single one is the fastest on every machine.

    ``sum`` and ``norm`` are torch's; ``loop`` is a plain loop of vector loads, there once the C++ kernels are loaded.
    """
    found: dict[str, Callable[[Tensor], object]] = {"sum": torch.sum, "norm": torch.linalg.vector_norm}
    with contextlib.suppress(AttributeError):
        found["loop"] = torch.ops.pagedllm_cpu.sum_words
    return found
