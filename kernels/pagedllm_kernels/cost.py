"""What the operations must move and multiply at least, and how long a device needs for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["H200", "Cost", "Device", "attention_cost", "elementwise_cost", "linear_cost"]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one call.

    Attributes:
        num_bytes: Read and written once each.
        num_flops: Of matrix products, in which a multiplication and an addition count as two.
    """

    num_bytes: int
    num_flops: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(num_bytes=self.num_bytes + other.num_bytes, num_flops=self.num_flops + other.num_flops)

    def floor_s(self, device: Device) -> float:
        """Seconds that no implementation can beat on the device."""
        return max(self.num_bytes / device.bytes_per_s, self.num_flops / device.flops_per_s)

    def bound(self, device: Device) -> str:
        """What sets the floor."""
        by_memory = self.num_bytes / device.bytes_per_s >= self.num_flops / device.flops_per_s
        return "memory" if by_memory else "compute"


@dataclass(frozen=True, kw_only=True)
class Device:
    """Rates of a device: on paper, or measured."""

    name: str
    bytes_per_s: float
    flops_per_s: float


H200 = Device(name="H200", bytes_per_s=4.8e12, flops_per_s=989e12)
"""On paper; dense bfloat16."""


def attention_cost(
    lengths: Sequence[tuple[int, int]],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    window: int | None = None,
) -> Cost:
    """Causal attention.

    Args:
        lengths: Per sequence the new tokens and all tokens.
        itemsize: Bytes of one number.
        window: How many of the newest tokens, itself included, a token sees; None: all.
    """
    num_new = sum(new for new, _ in lengths)
    num_seen = sum(total if window is None else min(total, new + window - 1) for new, total in lengths)
    num_pairs = sum(_num_pairs(new, total, window or total) for new, total in lengths)
    return Cost(
        num_bytes=itemsize * head_dim * (2 * num_kv_heads * num_seen + 2 * num_heads * num_new),
        num_flops=4 * head_dim * num_heads * num_pairs,
    )


def _num_pairs(new: int, total: int, window: int) -> int:
    """Pairs of a new token and one that it sees: each sees one more than that before it, up to the window."""
    num_growing = min(max(window - (total - new), 0), new)
    first = total - new + 1
    return num_growing * first + num_growing * (num_growing - 1) // 2 + (new - num_growing) * window


def linear_cost(num_rows: int, num_in: int, num_out: int, *, itemsize: int) -> Cost:
    """A product with a weight matrix."""
    return Cost(
        num_bytes=itemsize * (num_rows * num_in + num_in * num_out + num_rows * num_out),
        num_flops=2 * num_rows * num_in * num_out,
    )


def elementwise_cost(num_elements: int, bytes_per_element: int) -> Cost:
    """What reads and writes each element once; its arithmetic is not worth counting."""
    return Cost(num_bytes=num_elements * bytes_per_element)
