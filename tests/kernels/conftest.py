"""The same random inputs in every run, since a tolerance that fails once in a hundred tells nobody anything."""

from __future__ import annotations

import pytest
import torch

from pagedllm_kernels.cpu import build
from pagedllm_kernels.cpu.kernels import CPUKernels
from pagedllm_kernels.interface import KernelsUnavailableError


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def kernels() -> CPUKernels:
    """The C++ kernels. With a compiler they must build: a skip then would hide one that no longer compiles."""
    try:
        build._find_compiler()
    except KernelsUnavailableError as error:
        pytest.skip(str(error))
    return CPUKernels()
