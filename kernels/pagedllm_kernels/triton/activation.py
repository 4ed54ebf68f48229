"""Gated activations: reads gate and up once, writes their product; bound by memory, 6 bytes an element in bfloat16."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .call import KernelCall

__all__ = ["gated_activation", "plan_gated_activation", "tanh"]

_COLUMNS_PER_PROGRAM = 1024


@triton.jit
def tanh(x):
    """By exp, which overflows to the right limits; its error of 1e-7 is absolute, as for all that is added to it."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _gated_activation_kernel(gate_up_ptr, out_ptr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < SIZE
    gate = tl.load(gate_up_ptr + row * (2 * SIZE) + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * (2 * SIZE) + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # sqrt(2 / pi), and the cubic term of the approximation.
        gate = gate * 0.5 * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row * SIZE + columns, (gate * up).to(out_ptr.dtype.element_ty), mask=inside)


def plan_gated_activation(gate_up: Tensor, out: Tensor, *, gelu: bool) -> KernelCall:
    """One program per row and 1,024 columns: 8 elements a thread, a load of 16 bytes in bfloat16."""
    num_rows, size = out.shape
    return KernelCall(
        kernel=_gated_activation_kernel,
        grid=(num_rows, triton.cdiv(size, _COLUMNS_PER_PROGRAM)),
        args={"gate_up_ptr": gate_up, "out_ptr": out},
        constants={"SIZE": size, "COLUMNS": _COLUMNS_PER_PROGRAM, "GELU": gelu},
        num_warps=4,
    )


def gated_activation(gate_up: Tensor, *, gelu: bool) -> Tensor:
    """``Kernels.gated_activation``."""
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    plan_gated_activation(gate_up, out, gelu=gelu).launch()
    return out
