"""One launch of a kernel as a value, so that what runs and what is only compiled are the same thing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import triton
from triton.runtime.jit import JITFunction

__all__ = ["PER_BATCH", "KernelCall", "is_interpreted", "next_power_of_2"]

PER_BATCH = ("table_stride", "num_seqs")
"""Numbers that change from batch to batch. Triton would compile a kernel anew, for seconds, where one of them happens
to be 1 or a multiple of 16."""


@dataclass(frozen=True, kw_only=True)
class KernelCall:
    """A kernel with everything that it is launched with.

    Attributes:
        kernel: Of ``triton.jit``.
        grid: Number of programs in up to three dimensions; with a 0 nothing is launched.
        args: Tensors and numbers by name.
        constants: Compile-time values by name; each set of them is a kernel of its own.
        num_warps: Warps of a program.
        num_stages: Depth of the loads that run ahead in loops.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2

    def launch(self) -> None:
        """Run it on the current stream; returns before it is done."""
        if 0 not in self.grid:
            self.kernel[self.grid](**self.args, **self.constants, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler is told. Fused multiply-add is said aloud: Triton is about to change its default."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


def is_interpreted(kernel: Any) -> bool:
    """Whether ``TRITON_INTERPRET=1`` was set when the kernel was defined: it then runs on CPU tensors, in numpy."""
    return not isinstance(kernel, JITFunction)


def next_power_of_2(number: int) -> int:
    """The least power of 2 that is at least ``number``; Triton's tensors have no other sizes."""
    power: int = triton.next_power_of_2(number)
    return power
