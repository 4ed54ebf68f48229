"""The host's KV blocks, and the copies that a step must make before it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .block_pool import BlockPool

__all__ = ["BlockCopy", "HostTier"]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The KV of one block, copied over all layers.

    Args:
        kind: ``out`` from the device to the host, ``in`` from the host to the device, ``device`` within the device.
    """

    kind: Literal["out", "in", "device"]
    source: int
    target: int


class HostTier:
    """Blocks in host memory, with the copies from and to them in the order in which they were decided.

    A copy's source may be given to somebody else right after the decision, so the order is part of the contract:
    done one after the other, before anything writes a block, every copy finds what it was meant to copy.

    Args:
        num_blocks: Size of the host's pool; 0 for none.
    """

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.num_copied_out = 0
        self.num_copied_in = 0
        self._copies: list[BlockCopy] = []

    def copy_out(self, block_id: int) -> int:
        """Copy a device block to a free host block, which the caller has made sure of; returns that."""
        host_block = self.pool.allocate(1)[0]
        self._copies.append(BlockCopy("out", block_id, host_block))
        self.num_copied_out += 1
        return host_block

    def copy_in(self, host_block: int, block_id: int) -> None:
        """Copy a host block to a device block, and free it."""
        self._copies.append(BlockCopy("in", host_block, block_id))
        self.num_copied_in += 1
        self.free(host_block)

    def copy_within_device(self, source: int, target: int) -> None:
        self._copies.append(BlockCopy("device", source, target))

    def free(self, host_block: int) -> None:
        self.pool.release([host_block])
        self.pool.recycle(host_block)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """What has been decided since the last call."""
        copies, self._copies = tuple(self._copies), []
        return copies
