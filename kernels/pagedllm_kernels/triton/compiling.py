"""Compiling kernels for GPUs that are not there, and reading from the machine code what it needs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .call import KernelCall

__all__ = ["SHARED_LIMITS", "Compiled", "compile_call"]

SHARED_LIMITS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that a program may have, by compute capability."""

_REGISTERS = 65536
_THREADS = 2048
_RESERVED_SHARED = 1024
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the machine code of a kernel needs.

    Attributes:
        num_registers: Of a thread.
        stack_bytes: Of a thread; where kernels have no arrays of their own these are spilled registers.
        shared_bytes: Of a program.
        num_programs: How many a multiprocessor holds at once, as far as registers, threads and shared memory go.
    """

    num_registers: int
    stack_bytes: int
    shared_bytes: int
    num_programs: int

    def complaint(self, capability: int, *, allowed_stack_bytes: int = 0) -> str | None:
        """Why it must not be shipped, or None."""
        if self.stack_bytes > allowed_stack_bytes:
            return f"spills {self.stack_bytes} bytes a thread"
        limit = SHARED_LIMITS[capability]
        return f"needs {self.shared_bytes} of {limit} bytes of shared memory" if self.shared_bytes > limit else None


def compile_call(call: KernelCall, capability: int) -> Compiled:
    """Compile a launch for a GPU of that compute capability (80, 90 or 100), as the launch itself would.

    Tensors may be on the meta device: only types matter, and that a tensor begins at a multiple of 16 bytes.
    """
    compiled = triton.compile(_source(call), target=GPUTarget("cuda", capability, 32), options={**call.options})
    registers, stack = _read_resources(compiled.asm["cubin"])
    shared = compiled.metadata.shared
    threads = 32 * call.num_warps
    per_program = (
        _REGISTERS // (-(-registers // 8) * 8 * threads),  # registers are given in eights
        _THREADS // threads,
        (SHARED_LIMITS[capability] + _RESERVED_SHARED) // (shared + _RESERVED_SHARED),
    )
    return Compiled(num_registers=registers, stack_bytes=stack, shared_bytes=shared, num_programs=min(per_program))


def _source(call: KernelCall) -> ASTSource:
    """The kernel with the types and the specialisation that Triton's launcher would find."""
    signature, constants, attributes = {}, {}, {}
    values: dict[str, Any] = {**call.args, **call.constants}
    for i, parameter in enumerate(call.kernel.params):
        name, is_specialized = parameter.name, not parameter.do_not_specialize
        value = values[name]
        if name in call.constants or (isinstance(value, int) and value == 1 and is_specialized):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name], is_aligned = f"*{_TYPES[value.dtype]}", True
        elif isinstance(value, float):
            signature[name], is_aligned = "fp32", False
        else:
            signature[name], is_aligned = "i32" if abs(value) < 2**31 else "i64", value % 16 == 0 and is_specialized
        if is_aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(call.kernel, signature=signature, constexprs=constants, attrs=attributes)


def _read_resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread, as cuobjdump tells them."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        done = subprocess.run([tool, "-res-usage", str(path)], capture_output=True, text=True, check=True, timeout=60)
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    if found is None:
        raise RuntimeError(f"{tool} told no resource usage: {done.stdout[:500]}")
    return int(found[1]), int(found[2])
