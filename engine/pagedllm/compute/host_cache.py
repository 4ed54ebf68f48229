"""KV blocks in host memory, and the copies between them and the device's."""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import Iterator, Sequence

import torch

from ..control.host_tier import BlockCopy
from .kv_cache import KVCache

__all__ = ["MEASURED_BLOCKS", "HostCache", "runs_of_copies"]

MEASURED_BLOCKS = 64
"""Copied to tell the rate."""


class HostCache:
    """A second pool of blocks, each in one piece.

    Copies are done when ``copy`` returns. Where the engine runs on a CPU the device's memory is the host's too; the
    copies are real all the same.

    Args:
        device_cache: The pool that it backs.
        num_blocks: Its own size; the system provides memory as blocks are written.
    """

    def __init__(self, device_cache: KVCache, num_blocks: int) -> None:
        self._device = device_cache.blocks
        shape = (num_blocks, *self._device.shape[1:])
        num_bytes = max(torch.Size(shape).numel(), 1) * self._device.dtype.itemsize
        self._host = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=self._device.dtype)
        self._host = self._host[: torch.Size(shape).numel()].view(shape)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Do the copies with the effect of doing them one after the other."""
        for kind, sources, targets in runs_of_copies(copies):
            source = self._host if kind == "in" else self._device
            target = self._host if kind == "out" else self._device
            blocks = source.index_select(0, torch.tensor(sources, device=source.device))
            target.index_copy_(0, torch.tensor(targets, device=target.device), blocks.to(target.device))

    def measure_copy_rate(self) -> float:
        """Bytes per second of copies to the host, measured on a few blocks, whose contents stay as they are."""
        num_blocks = min(MEASURED_BLOCKS, len(self._host), len(self._device))
        copies = [BlockCopy("out", index, index) for index in range(num_blocks)]
        self.copy(copies)  # the first time, the system provides the pages
        start = time.perf_counter()
        self.copy(copies)
        seconds = time.perf_counter() - start
        return num_blocks * self._device[0].numel() * self._device.dtype.itemsize / seconds


def runs_of_copies(copies: Sequence[BlockCopy]) -> Iterator[tuple[str, list[int], list[int]]]:
    """Runs of copies of one kind, as (kind, sources, targets), whose order among themselves does not matter.

    No block is written twice in a run, and within the device none is both read and written.
    """
    for kind, group in itertools.groupby(copies, key=lambda copy: copy.kind):
        sources: list[int] = []
        targets: list[int] = []
        read: set[int] = set()
        written: set[int] = set()
        for copy in group:
            if copy.target in written or (kind == "device" and (copy.source in written or copy.target in read)):
                yield kind, sources, targets
                sources, targets, read, written = [], [], set(), set()
            sources.append(copy.source)
            targets.append(copy.target)
            read.add(copy.source)
            written.add(copy.target)
        yield kind, sources, targets
