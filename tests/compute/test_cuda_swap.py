"""Copies to and from the host on streams that go on side by side, in every order that their marks allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tiny_models import write_hf_llama
from torch import Tensor

from pagedllm.compute.cuda_swap import StagedHostCache, _pin, _unpin
from pagedllm.compute.host_cache import HostCache, runs_of_copies
from pagedllm.compute.kv_cache import KVCache
from pagedllm.compute.models.config import ModelConfig, load_config_file
from pagedllm.control.host_tier import BlockCopy
from pagedllm.errors import ConfigError

_NUM_BLOCKS, _NUM_HOST_BLOCKS = 6, 5


class TorchCopies:
    """Obeys ``CopyKernels``."""

    def copy_blocks(self, source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
        target[:, target_ids.long()] = source[:, source_ids.long()]


class Device:
    """Does the work of its streams in random order, except that each keeps its own and obeys the marks."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.streams = [FakeStream(self), FakeStream(self)]

    def run_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            able = [stream for stream in self.streams if stream.is_able]
            assert able, "the streams wait for each other"
            self._rng.choice(able).advance()


class FakeStream:
    """Obeys ``Stream``. A mark is a stream and how much of it must be done."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._work: deque[Callable[[], None] | tuple[FakeStream, int]] = deque()
        self._num_given = self._num_done = 0

    def run(self, work: Callable[[], None]) -> None:
        self._give(work)

    def mark(self) -> Any:
        return self, self._num_given

    def wait_for(self, mark: Any) -> None:
        self._give(mark)

    def synchronize(self) -> None:
        goal = self._num_given
        self._device.run_until(lambda: self._num_done >= goal)

    def _give(self, work: Any) -> None:
        self._work.append(work)
        self._num_given += 1

    @property
    def is_able(self) -> bool:
        if not self._work:
            return False
        head = self._work[0]
        return not isinstance(head, tuple) or head[0]._num_done >= head[1]

    def advance(self) -> None:
        head = self._work.popleft()
        if not isinstance(head, tuple):
            head()
        self._num_done += 1


def random_copies(rng: random.Random) -> list[BlockCopy]:
    sizes = {"out": (_NUM_BLOCKS, _NUM_HOST_BLOCKS), "in": (_NUM_HOST_BLOCKS, _NUM_BLOCKS)}
    copies = []
    for _ in range(rng.randrange(10)):
        kind = rng.choice(["out", "out", "in", "in", "device"])
        num_sources, num_targets = sizes.get(kind, (_NUM_BLOCKS, _NUM_BLOCKS))
        copies.append(BlockCopy(kind, rng.randrange(num_sources), rng.randrange(num_targets)))
    return copies


@pytest.mark.parametrize("num_staged", [1, 2, 9])
def test_copies_beside_steps_have_the_effect_of_one_after_the_other(num_staged: int):
    """A mark that nobody waits for: a block is overwritten before it left, read before it came, or half a block."""
    for seed in range(150):
        run_steps(random.Random(seed), num_staged)


def run_steps(rng: random.Random, num_staged: int) -> None:
    """Steps that look at all blocks and then write one, with copies before each."""
    planes, host = torch.randn(2, _NUM_BLOCKS, 3), torch.randn(_NUM_HOST_BLOCKS, 2, 3)
    expected, expected_host = planes.clone(), host.clone()
    compute, side = Device(rng).streams
    staging_bytes = num_staged * 2 * 3 * 4
    cache = StagedHostCache(planes, host, TorchCopies(), compute=compute, side=side, staging_bytes=staging_bytes)
    seen: list[Tensor] = []
    expected_seen: list[Tensor] = []

    def compute_step(written: int, value: int) -> None:
        seen.append(planes.clone())
        planes[:, written] = value

    for step in range(6):
        copies, written = random_copies(rng), rng.randrange(_NUM_BLOCKS)
        cache.copy(copies)
        compute.run(partial(compute_step, written, step))
        for copy in copies:
            move(copy, expected, expected_host)
        expected_seen.append(expected.clone())
        expected[:, written] = step
        if rng.random() < 0.3:
            compute.synchronize()  # where a step's tokens are read
    compute.synchronize()
    side.synchronize()
    assert torch.equal(torch.stack(seen), torch.stack(expected_seen))
    assert torch.equal(host, expected_host)
    assert torch.equal(planes, expected)


def move(copy: BlockCopy, planes: Tensor, host: Tensor) -> None:
    """One copy by definition."""
    if copy.kind == "out":
        host[copy.target] = planes[:, copy.source]
    elif copy.kind == "in":
        planes[:, copy.target] = host[copy.source]
    else:
        planes[:, copy.target] = planes[:, copy.source].clone()


def test_a_step_does_not_wait_for_what_leaves():
    """Copies to the host that the next step stands behind, though they have a staging buffer each."""
    device = Device(random.Random(0))
    compute, side = device.streams
    planes, host = torch.randn(2, _NUM_BLOCKS, 3), torch.zeros(_NUM_HOST_BLOCKS, 2, 3)
    cache = StagedHostCache(planes, host, TorchCopies(), compute=compute, side=side)
    cache.copy([BlockCopy("out", 0, 1), BlockCopy("out", 3, 2)])
    before = planes.clone()
    compute.run(planes.zero_)
    while compute.is_able:
        compute.advance()
    assert not planes.any(), "the step is done"
    assert not host.any(), "and nothing has left the device"
    side.synchronize()
    assert torch.equal(host[1:3], before[:, [0, 3]].transpose(0, 1))


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("swap")
    write_hf_llama(folder, num_layers=2)
    return load_config_file(folder / "config.json")


@torch.inference_mode()
def test_a_pool_made_for_inference_can_be_copied_by_plain_torch(model_config: ModelConfig):
    """An engine's pool on a GPU is made in inference mode; both kinds of cache mean the same blocks."""
    cache = KVCache(model_config, num_blocks=4, block_size=2, dtype=torch.float32)
    cache.blocks.normal_()
    assert torch.equal(cache.planes[:, 3].flatten(), cache.blocks[3].flatten())
    before = cache.blocks.clone()
    HostCache(cache, 2).copy([BlockCopy("out", 1, 0), BlockCopy("device", 2, 1), BlockCopy("in", 0, 3)])
    assert torch.equal(cache.blocks, before[[0, 2, 2, 1]])


def test_no_run_within_the_device_reads_what_it_writes():
    """Launched at once, block 1 may be overwritten before it is copied."""
    copies = [BlockCopy("device", 1, 0), BlockCopy("device", 2, 1), BlockCopy("device", 1, 3)]
    assert list(runs_of_copies(copies)) == [("device", [1], [0]), ("device", [2], [1]), ("device", [1], [3])]
    copies = [BlockCopy("out", 1, 0), BlockCopy("out", 2, 1), BlockCopy("out", 3, 0)]
    assert list(runs_of_copies(copies)) == [("out", [1, 2], [0, 1]), ("out", [3], [0])]


class FakeDriver:
    """What of CUDA's runtime pins memory."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.pinned: list[tuple[int, int]] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if not self.error:
            self.pinned.append((address, num_bytes))
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        self.pinned = [item for item in self.pinned if item[0] != address]
        return 0


def test_memory_is_pinned_as_it_is_and_unpinned_after_its_copies(monkeypatch: pytest.MonkeyPatch):
    """Memory that stays locked when an engine is closed, or is let go under a transfer."""
    driver, device = FakeDriver(0), Device(random.Random(0))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    host, done = torch.zeros(_NUM_HOST_BLOCKS, 2, 3), []
    _pin(host)
    assert driver.pinned == [(host.data_ptr(), host.nbytes)]
    device.streams[1].run(lambda: done.append(driver.pinned[0][0]))
    _unpin(host, device.streams[1])
    assert done == [host.data_ptr()]
    assert not driver.pinned


def test_what_cannot_be_pinned_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeDriver(2))
    with pytest.raises(ConfigError, match=r"swap_space=.*does not pin.*CUDA error 2"):
        _pin(torch.zeros(_NUM_HOST_BLOCKS, 2, 3))
