"""``python -m pagedllm_kernels.compile_check``: compile every Triton kernel for GPUs that are not there.

Every kernel at every launch configuration that real models use, for A100 (sm_80), H100 and H200 (sm_90) and B200
(sm_100). Prints registers, stack and shared memory from the machine code, and how long an H200 needs at least for what
the kernel moves and multiplies. Fails if one spills registers or wants more shared memory than there is.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from .cost import H200
from .triton.call import PER_BATCH, is_interpreted
from .triton.cases import MODELS, Case, model_cases
from .triton.compiling import SHARED_LIMITS, Compiled, compile_call

__all__ = ["main"]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# float32, which serves tests, has no matrix units: ptxas gives up a few registers for one more program at once.
_ALLOWED_STACK_BYTES = {"float32": 16}
_BLOCK_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table."""

    model: str
    dtype: str
    block_size: int
    case: Case

    @property
    def key(self) -> tuple[Any, ...]:
        """Launches that are compiled to the same code: what is constant, and the types and divisibility of the rest."""
        call = self.case.call
        kinds = [
            str(value.dtype)
            if isinstance(value, torch.Tensor)
            else (type(value), *((value == 1, value % 16 == 0) if name not in PER_BATCH else ()))
            for name, value in call.args.items()
        ]
        return (call.kernel.__name__, *call.constants.items(), *kinds, *call.options.items())


@functools.cache
def rows(*, is_quick: bool) -> tuple[Row, ...]:
    """One row for every piece of code that is compiled; quick: bfloat16 and blocks of 16 only, two models."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in _quick_rows() if is_quick else _all_rows():
        found.setdefault(row.key, row)
    return tuple(found.values())


def _all_rows() -> Iterator[Row]:
    for model in MODELS:
        for dtype in _DTYPES:
            # Blocks other than 16 change one division: enough to see it for one model.
            for block_size in _BLOCK_SIZES if (model.name, dtype) == ("Llama-3.1-8B", "bfloat16") else (16,):
                for case in model_cases(model, _DTYPES[dtype], block_size):
                    yield Row(model=model.name, dtype=dtype, block_size=block_size, case=case)


def _quick_rows() -> Iterator[Row]:
    return (
        row
        for row in _all_rows()
        if row.dtype == "bfloat16" and row.block_size == 16 and row.model in ("Qwen3-0.6B", "Gemma-2-27b")
    )


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the check; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pagedllm_kernels.compile_check", description=__doc__)
    parser.add_argument("--sm", type=int, action="append", choices=sorted(SHARED_LIMITS), help="default: all")
    parser.add_argument("--quick", action="store_true", help="bfloat16 and two models only")
    options = parser.parse_args(None if arguments is None else list(arguments))
    table = rows(is_quick=options.quick)
    if is_interpreted(table[0].case.call.kernel):
        parser.error("TRITON_INTERPRET is set: kernels would be interpreted, not compiled")
    complaints = [line for sm in options.sm or sorted(SHARED_LIMITS) for line in check(sm, is_quick=options.quick)]
    print(f"{len(table)} kernels; {len(complaints)} failed" + "".join(f"\n  {line}" for line in complaints))
    return 1 if complaints else 0


def check(capability: int, *, is_quick: bool) -> Iterator[str]:
    """Print the table of one kind of GPU, as fast as it is compiled; yields what is wrong."""
    rates = f"{H200.bytes_per_s / 1e12} TB/s, {H200.flops_per_s / 1e12:.0f} TFLOP/s"
    print(f"\nsm_{capability}; floors for an H200 on paper: {rates}")
    needs = f"{'warps':>6}{'regs':>5}{'stack':>6}{'shared':>8}{'per SM':>7}"
    print(f"{'kernel':18}{'model':14}{'dtype':10}{'block':>5}  {'at':20}{needs}{'MB':>9}{'GFLOP':>9}{'floor us':>10}")
    table = rows(is_quick=is_quick)
    compile_row = functools.partial(_compile_row, is_quick=is_quick, capability=capability)
    # Fresh processes: a compiler forked from one with threads may wait for ever.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for row, compiled in zip(table, pool.map(compile_row, range(len(table))), strict=True):
            print(_line(row, compiled), flush=True)
            complaint = compiled.complaint(capability, allowed_stack_bytes=_ALLOWED_STACK_BYTES.get(row.dtype, 0))
            if complaint is not None:
                yield f"sm_{capability} {_name(row)}: {complaint}"


def _compile_row(index: int, *, is_quick: bool, capability: int) -> Compiled:
    """In a process of its own, which makes the rows anew: kernels cannot be sent there."""
    return compile_call(rows(is_quick=is_quick)[index].case.call, capability)


def _name(row: Row) -> str:
    kernel = row.case.call.kernel.__name__.strip("_").removesuffix("_kernel")
    return f"{kernel:18}{row.model:14}{row.dtype:10}{row.block_size:5}  {row.case.name:20}"


def _line(row: Row, compiled: Compiled) -> str:
    needs = f"{row.case.call.num_warps:6}{compiled.num_registers:5}{compiled.stack_bytes:6}{compiled.shared_bytes:8}"
    line, cost = f"{_name(row)}{needs}{compiled.num_programs:7}", row.case.cost
    if cost is None:
        return line
    floor = f"{cost.num_bytes / 1e6:9.2f}{cost.num_flops / 1e9:9.2f}{cost.floor_s(H200) * 1e6:10.1f}"
    return f"{line}{floor} by {cost.bound(H200)}"


if __name__ == "__main__":
    sys.exit(main())
