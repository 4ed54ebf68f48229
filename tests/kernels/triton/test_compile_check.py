"""What the kernels need on a GPU, read from machine code that is made without one."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from pagedllm_kernels import compile_check
from pagedllm_kernels.cost import H200, Cost, attention_cost
from pagedllm_kernels.triton.call import PER_BATCH
from pagedllm_kernels.triton.compiling import SHARED_LIMITS, Compiled


def run(*arguments: str, interpret: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pagedllm_kernels.compile_check", *arguments]
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def test_kernels_compile_for_an_h100_without_spills():
    """A kernel that only the interpreter understands, or that no longer fits into registers or shared memory."""
    done = run("--sm", "90", "--quick")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "0 failed" in done.stdout


def test_interpreted_kernels_are_not_said_to_compile():
    done = run("--quick", interpret=True)
    assert done.returncode == 2
    assert "TRITON_INTERPRET" in done.stderr


@pytest.mark.parametrize(
    ("needs", "complaint"),
    [
        ({}, None),
        ({"stack_bytes": 8}, "spills 8 bytes"),
        ({"shared_bytes": SHARED_LIMITS[90]}, None),
        ({"shared_bytes": SHARED_LIMITS[90] + 1}, "of shared memory"),
    ],
)
def test_what_is_complained_about(needs: dict[str, int], complaint: str | None):
    """A check that never fails."""
    found = Compiled(**({"num_registers": 99, "stack_bytes": 0, "shared_bytes": 1, "num_programs": 1} | needs))
    said = found.complaint(90)
    assert said is None if complaint is None else complaint in str(said)


def test_every_kernel_model_and_dtype_is_compiled():
    """A kernel that nobody compiles is not checked."""
    rows = compile_check.rows(is_quick=False)
    kernels = {row.case.call.kernel.__name__ for row in rows}
    assert {name.strip("_").removesuffix("_kernel") for name in kernels} == {
        *("add_rms_norm", "copy", "decode", "gated_activation", "merge", "norm_heads", "prefill", "rope_store"),
        "sample",
    }
    assert {row.dtype for row in rows} == {"bfloat16", "float16", "float32"}
    assert {row.block_size for row in rows} == {16, 32, 64, 128}
    assert len({row.model for row in rows}) == 6
    assert {row.key for row in compile_check.rows(is_quick=True)} < {row.key for row in rows}


def test_no_batch_is_compiled_for_anew():
    """A first request that waits for the compiler because its table is 16 blocks wide, or because it is alone."""
    script = (
        "from pagedllm_kernels.triton import attention_decode, attention_prefill\n"
        "for kernel in (attention_decode._decode_kernel, attention_prefill._prefill_kernel):\n"
        "    print(*(item.name for item in kernel.params if item.do_not_specialize))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.split("\n")[:2] == ["table_stride", "table_stride num_seqs"]
    assert set(PER_BATCH) == {"table_stride", "num_seqs"}


def test_attention_cost():
    """Pairs counted one by one, with and without a window."""
    for new, total in [(1, 1), (1, 9), (5, 5), (4, 9), (9, 9)]:
        for window in (None, 1, 3, 6, 20):
            seen = [min(position + 1, window or total) for position in range(total - new, total)]
            options: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "itemsize": 2}
            cost = attention_cost([(new, total)], window=window, **options)
            assert cost.num_flops == 4 * 8 * 6 * sum(seen)
            first = min(position - count + 1 for position, count in zip(range(total - new, total), seen, strict=True))
            assert cost.num_bytes == 2 * 8 * (2 * 2 * (total - first) + 2 * 6 * new)


def test_floor():
    assert Cost(num_bytes=int(H200.bytes_per_s)).floor_s(H200) == 1
    assert Cost(num_bytes=1, num_flops=int(H200.flops_per_s) * 2).floor_s(H200) == 2
    assert Cost(num_bytes=int(H200.bytes_per_s), num_flops=1).bound(H200) == "memory"
    assert (Cost(num_bytes=1, num_flops=2) + Cost(num_bytes=3, num_flops=4)) == Cost(num_bytes=4, num_flops=6)


def test_launch_tables_are_powers_of_two():
    """Triton's tensors have no other sizes; a group of 12 or a head of 96 must not make one."""
    for row in compile_check.rows(is_quick=False):
        constants = row.case.call.constants
        for name in ("ROWS", "TILE", "NUM_SPLITS", "PADDED", "COLUMNS", "HEADS"):
            size = constants.get(name, 1)
            assert size & (size - 1) == 0, f"{row.case.name}: {name} {size}"
        if "ROWS" in constants:
            assert constants["ROWS"] >= constants["NUM_HEADS"] // constants["NUM_KV_HEADS"]
