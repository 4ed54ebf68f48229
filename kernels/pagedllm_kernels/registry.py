"""Which implementation of the operations serves."""

from __future__ import annotations

import functools
import logging

import torch

from .cpu.kernels import CPUKernels
from .interface import Kernels, KernelsUnavailableError
from .reference import ReferenceKernels

__all__ = ["KERNELS", "select_kernels"]

logger = logging.getLogger("pagedllm.kernels")

KERNELS = ("auto", "cpu", "reference")


def select_kernels(
    name: str, dtype: torch.dtype, *, head_dim: int, hidden_size: int, intermediate_size: int
) -> Kernels:
    """The kernels of that name for a model of that dtype and shape; ``"auto"`` takes the fastest that run here.

    Raises:
        KernelsUnavailableError: They were asked for by name and cannot run here, or not this model.
    """
    if name == "reference":
        return ReferenceKernels()
    reason = CPUKernels.refusal(dtype, head_dim=head_dim, hidden_size=hidden_size, intermediate_size=intermediate_size)
    if reason is None:
        try:
            return CPUKernels()
        except KernelsUnavailableError as error:
            reason = str(error)
    if name == "cpu":
        raise KernelsUnavailableError(f"kernels='cpu': {reason}")
    _warn_once(reason)
    return ReferenceKernels()


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("plain torch serves instead of the fast CPU kernels: %s", reason)
