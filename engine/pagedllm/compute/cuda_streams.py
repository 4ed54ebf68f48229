"""Streams of a device: queues of work that go on side by side, and wait for each other's marks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ["CudaStream", "ImmediateStream", "Mark", "Stream"]

Mark = Any
"""A place in a stream: all work that it had then. Only streams of the same kind know what it is."""


class Stream(Protocol):
    """Work done in the order in which it came. Calls return before it is done, except ``synchronize``."""

    def run(self, work: Callable[[], None]) -> None:
        """Do this next. Whatever it touches stays allocated until it is done: the caller sees to that."""
        ...

    def mark(self) -> Mark:
        """When everything so far is done."""
        ...

    def wait_for(self, mark: Mark) -> None:
        """Begin nothing of what comes until another stream has reached its mark."""
        ...

    def synchronize(self) -> None:
        """Block until everything so far is done."""
        ...


class CudaStream:
    """Implements ``Stream`` by a stream of CUDA."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> Mark:
        return self._stream.record_event()

    def wait_for(self, mark: Mark) -> None:
        self._stream.wait_event(mark)

    def synchronize(self) -> None:
        self._stream.synchronize()


class ImmediateStream:
    """Implements ``Stream`` for a CPU, where everything is done at once: any two of them keep the order of calls."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def mark(self) -> Mark:
        return None

    def wait_for(self, mark: Mark) -> None:
        pass

    def synchronize(self) -> None:
        pass
