"""Triton kernels run in its interpreter, on CPU tensors: tests/conftest.py asks for it before Triton is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedllm_kernels.triton.activation import tanh
from pagedllm_kernels.triton.call import is_interpreted


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """exp() overflows to inf on purpose; numpy, in which kernels are interpreted, warns of that."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"))


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    assert is_interpreted(tanh), "Triton was imported before TRITON_INTERPRET was set"
