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

_CPU = torch.device("cpu")
KERNELS = ("auto", "cpu", "reference", "triton")


def select_kernels(
    name: str,
    dtype: torch.dtype,
    *,
    head_dim: int,
    hidden_size: int,
    intermediate_size: int,
    device: torch.device = _CPU,
) -> Kernels:
    """The kernels of that name for a model of that dtype and shape; ``"auto"`` takes the fastest that run there.

    Raises:
        KernelsUnavailableError: They were asked for by name and cannot run here, or not this model.
    """
    if name == "reference":
        return ReferenceKernels()
    if name == "triton" or (name == "auto" and device.type == "cuda"):
        return _triton_kernels(dtype, device, head_dim)
    if device.type != "cpu":
        raise KernelsUnavailableError(f"kernels={name!r}: they compute on the CPU, not on {device}")
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


def _triton_kernels(dtype: torch.dtype, device: torch.device, head_dim: int) -> Kernels:
    try:
        from .triton.kernels import TritonKernels  # noqa: PLC0415 - only who has a GPU needs Triton
    except ImportError as error:
        raise KernelsUnavailableError(f"kernels='triton': {error}; install triton") from error
    reason = TritonKernels.refusal(dtype, device=device, head_dim=head_dim)
    if reason is None and device.type == "cuda":
        reason = TritonKernels.failure(device)
    if reason is not None:
        raise KernelsUnavailableError(f"kernels='triton': {reason}")
    return TritonKernels()


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("plain torch serves instead of the fast CPU kernels: %s", reason)
