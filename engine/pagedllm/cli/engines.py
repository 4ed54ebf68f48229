"""Engines for commands, which own their process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..config import EngineConfig
from ..errors import ConfigError
from ..registry import load_engine

if TYPE_CHECKING:
    from ..core import StepRecord
    from ..local import LocalEngine

__all__ = ["THREADS_VARIABLE", "open_engine", "set_num_threads"]

THREADS_VARIABLE = "PAGEDLLM_NUM_THREADS"


def open_engine(config: EngineConfig, *, on_step: Callable[[StepRecord], None] | None = None) -> LocalEngine:
    """Load an engine, with the number of threads that ``PAGEDLLM_NUM_THREADS`` asks for.

    Raises:
        ConfigError: The variable is not a positive number.
        PagedLLMError: The engine cannot be loaded.
    """
    set_num_threads()
    return load_engine(config, on_step=on_step)


def set_num_threads() -> None:
    """Give torch the number of threads that ``PAGEDLLM_NUM_THREADS`` asks for, if it does.

    A library must not change torch's global settings; a process of ours may.

    Raises:
        ConfigError: The variable is not a positive number.
    """
    value = os.environ.get(THREADS_VARIABLE)
    if value:
        if not value.isdecimal() or int(value) < 1:
            raise ConfigError.for_value(THREADS_VARIABLE, value, "must be a whole number of at least 1")
        _set_num_threads(int(value))


def _set_num_threads(num_threads: int) -> None:
    try:
        import torch  # noqa: PLC0415  takes a second, and only commands that run a model need it
    except ModuleNotFoundError:
        return  # the engine will say what to install
    torch.set_num_threads(num_threads)
