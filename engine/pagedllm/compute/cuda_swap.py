"""KV blocks in pinned host memory, and copies between them and a GPU's that go on beside the computation.

A block's pieces are spread over the planes of the pool, too small for the bus. So copies go by way of staging buffers
on the device: a kernel on the compute stream gathers the pieces of blocks there, or scatters them; a stream of its own
moves whole blocks between there and the host. Copying out, the compute stream goes on as soon as the pieces are
gathered, and may overwrite the blocks; it waits only where a staging buffer is still on its way. Copying in, it waits
for the blocks, which the step is about to read.
"""

from __future__ import annotations

import mmap
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pagedllm_kernels.interface import CopyKernels

from ..control.host_tier import BlockCopy
from ..errors import ConfigError
from .cuda_streams import CudaStream, ImmediateStream, Mark, Stream
from .host_cache import MEASURED_BLOCKS, runs_of_copies
from .kv_cache import KVCache

__all__ = ["StagedHostCache", "make_staged_host_cache"]

_STAGING_BYTES = 32 * 2**20
"""Of each buffer: a millisecond of the bus, long against what it takes to start a copy."""
_NUM_STAGING = 2
"""One is filled while the other is on its way."""


def make_staged_host_cache(
    device_cache: KVCache, num_blocks: int, kernels: CopyKernels, device: torch.device
) -> StagedHostCache:
    """The host's pool for a device; its copies are ordered with the current stream, which is to compute every step.

    Raises:
        ConfigError: The system does not let so much memory be pinned.
    """
    planes = device_cache.planes
    shape = torch.Size((num_blocks, planes.shape[0], *planes.shape[2:]))
    host = torch.empty(shape, dtype=planes.dtype)
    if num_blocks:  # pages, so that what is pinned begins and ends with one
        host = torch.frombuffer(mmap.mmap(-1, host.nbytes), dtype=planes.dtype).view(shape)
    if device.type != "cuda":
        return StagedHostCache(planes, host, kernels, compute=ImmediateStream(), side=ImmediateStream())
    side = CudaStream(torch.cuda.Stream(device))
    cache = StagedHostCache(planes, host, kernels, compute=CudaStream(torch.cuda.current_stream(device)), side=side)
    if num_blocks:
        _pin(host)
        # The memory must not go back to the system while it is pinned, nor be unpinned under a copy.
        weakref.finalize(cache, _unpin, host, side).atexit = False
    return cache


class StagedHostCache:
    """A second pool of blocks, each in one piece, on the host. Owned by the thread that computes.

    Args:
        planes: The device's pool, [num_planes, num_blocks, ...].
        host: The host's, [num_host_blocks, num_planes, ...]. On a GPU it is pinned, or copies would block.
        kernels: Gather and scatter.
        compute: The stream in which steps are computed.
        side: Another for transfers.
        staging_bytes: Of each buffer; one block at least.
    """

    def __init__(
        self,
        planes: Tensor,
        host: Tensor,
        kernels: CopyKernels,
        *,
        compute: Stream,
        side: Stream,
        staging_bytes: int = _STAGING_BYTES,
    ) -> None:
        self._planes = planes
        self._host = host
        self._kernels = kernels
        self._compute = compute
        self._side = side
        self._block_bytes = planes[:, 0].numel() * planes.dtype.itemsize
        self._num_staged = max(min(staging_bytes // self._block_bytes, len(host)), 1)
        shape = (self._num_staged, *host.shape[1:])
        self._staging = [_Staging(planes.new_empty(shape)) for _ in range(_NUM_STAGING if len(host) else 0)]
        self._num_sent = 0

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Start the copies; later work of the compute stream finds them done one after the other."""
        for kind, sources, targets in runs_of_copies(copies):
            if kind == "device":
                self._compute.run(partial(self._copy_pieces, self._planes, self._planes, sources, targets))
                continue
            copy = self._copy_out if kind == "out" else self._copy_in
            for start in range(0, len(sources), self._num_staged):
                part = slice(start, start + self._num_staged)
                copy(sources[part], targets[part], self._next_staging())

    def synchronize(self) -> None:
        """Block until all copies are done."""
        self._compute.synchronize()
        self._side.synchronize()

    def measure_copy_rate(self) -> float:
        """Bytes per second of copies to the host, measured on a few blocks, whose contents stay as they are."""
        num_blocks = min(MEASURED_BLOCKS, len(self._host), self._planes.shape[1])
        copies = [BlockCopy("out", index, index) for index in range(num_blocks)]
        for _ in range(2):  # the first time, the system provides the pages, and kernels are compiled
            self.synchronize()
            start = time.perf_counter()
            self.copy(copies)
            self.synchronize()
        return num_blocks * self._block_bytes / (time.perf_counter() - start)

    def _copy_out(self, blocks: list[int], host_blocks: list[int], staging: _Staging) -> None:
        staging.wait(self._compute)
        order, buffer = list(range(len(blocks))), staging.planes
        self._compute.run(partial(self._copy_pieces, self._planes, buffer, blocks, order))
        # Order on the host needs no marks: all that touches its blocks is in the side stream.
        self._side.wait_for(self._compute.mark())
        self._side.run(partial(self._send, staging.blocks, host_blocks))
        staging.free_at = self._side.mark()

    def _copy_in(self, host_blocks: list[int], blocks: list[int], staging: _Staging) -> None:
        staging.wait(self._side)
        self._side.run(partial(self._fetch, host_blocks, staging.blocks))
        self._compute.wait_for(self._side.mark())
        order, buffer = list(range(len(blocks))), staging.planes
        self._compute.run(partial(self._copy_pieces, buffer, self._planes, order, blocks))
        staging.free_at = self._compute.mark()

    def _next_staging(self) -> _Staging:
        self._num_sent += 1
        return self._staging[self._num_sent % _NUM_STAGING]

    def _copy_pieces(self, source: Tensor, target: Tensor, source_ids: list[int], target_ids: list[int]) -> None:
        num_copies = len(source_ids)
        # Both lists begin at a multiple of 16 bytes; for others Triton would compile the kernel again.
        ids = torch.zeros(2, -(-num_copies // 4) * 4, dtype=torch.int32)
        ids[:, :num_copies] = torch.tensor([source_ids, target_ids])
        if self._planes.is_cuda:
            # torch's allocator reuses pinned memory only when the copy from it is done.
            ids = ids.pin_memory().to(self._planes.device, non_blocking=True)
        self._kernels.copy_blocks(source, target, ids[0, :num_copies], ids[1, :num_copies])

    def _send(self, staged: Tensor, host_blocks: list[int]) -> None:
        for start, host_start, count in _stretches(host_blocks):
            self._host[host_start : host_start + count].copy_(staged[start : start + count], non_blocking=True)

    def _fetch(self, host_blocks: list[int], staged: Tensor) -> None:
        for start, host_start, count in _stretches(host_blocks):
            staged[start : start + count].copy_(self._host[host_start : host_start + count], non_blocking=True)


@dataclass(slots=True)
class _Staging:
    """A buffer on the device.

    Args:
        blocks: [num_staged, num_planes, ...].
        free_at: When what was done with it last is done; None before its first use.
    """

    blocks: Tensor
    free_at: Mark | None = None

    @property
    def planes(self) -> Tensor:
        """The same memory by plane, [num_planes, num_staged, ...]."""
        return self.blocks.transpose(0, 1)

    def wait(self, stream: Stream) -> None:
        """Let a stream go on only when the buffer is free."""
        if self.free_at is not None:
            stream.wait_for(self.free_at)


def _stretches(host_blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Blocks that follow each other, which one transfer can move: place in the list, first block, how many."""
    start = 0
    for i in range(1, len(host_blocks) + 1):
        if i == len(host_blocks) or host_blocks[i] != host_blocks[i - 1] + 1:
            yield start, host_blocks[start], i - start
            start = i


def _pin(host: Tensor) -> None:
    """Pin memory in place. torch's own pinned memory comes in powers of 2, which could be twice ``swap_space``."""
    error = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0))
    if error:
        gib = host.nbytes / 2**30
        allowed = f"the driver does not pin {gib:.2f} GiB of host memory (CUDA error {error}); lower it"
        raise ConfigError.for_value("swap_space", round(gib, 2), allowed)


def _unpin(host: Tensor, side: Stream) -> None:
    side.synchronize()
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
