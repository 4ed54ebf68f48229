"""The parts of the GPU check that need no GPU; kernels run in Triton's interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedllm.bench.gpu_check import CHECKS, MEASUREMENTS, Given, _command, _num_weights, run_in_process, run_parts
from pagedllm.bench.gpu_kernels import check_kernels, share_of_ceiling
from pagedllm.bench.gpu_parity import check_parity, check_swap
from pagedllm.bench.gpu_workloads import (
    LLAMA_8B,
    QWEN3_600M,
    Lengths,
    draw_lengths,
    make_scheduler,
    measure_swap,
    random_weights,
    roofline_s,
    run_sequences,
    sequences,
    write_config,
)  # fmt: skip
from pagedllm.compute.model_runner import ModelRunner
from pagedllm.config import EngineConfig
from pagedllm_kernels.cost import Cost, Device
from pagedllm_kernels.triton.kernels import TritonKernels

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_claimed(tmp_path: Path):
    """A report of zeros, or a success, where nothing was measured."""
    target = tmp_path / "report.json"
    command = [sys.executable, "-m", "pagedllm.bench.gpu_check", "--json", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "no GPU" in done.stderr
    assert not target.exists()
    assert done.stdout == ""


_SCRIPTS = {
    "fine": "json.dump({'x': 1}, open(sys.argv[1], 'w'))",
    "wrong": "json.dump({'failed': [1]}, open(sys.argv[1], 'w'))",
    "dies": "print('illegal memory access', file=sys.stderr, flush=True); os.abort()",
    "hangs": "import time; time.sleep(600)",
    "ceilings": "json.dump({'name': 'x', 'bytes_per_s': 2.0, 'flops_per_s': 3.0}, open(sys.argv[1], 'w'))",
    "speed": "json.dump({'given': sys.argv[2]}, open(sys.argv[1], 'w'))",
}


def scripted(name: str, target: Path, given: Given) -> list[str]:
    """In place of a part on a GPU."""
    ceilings = "none" if given.ceilings is None else str(given.ceilings.bytes_per_s)
    return [sys.executable, "-c", f"import json, os, sys; {_SCRIPTS[name]}", str(target), ceilings]


def test_a_part_that_dies_takes_no_other_with_it():
    """A kernel that reads where nothing is ends every later call of its process; and the report with it."""
    saved: list[dict[str, Any]] = []
    report = run_parts(["dies", "fine", "wrong"], ["ceilings", "speed"], saved.append, budget_s=900, command=scripted)
    assert "illegal memory access" in report["dies"]["error"]
    assert report["fine"] == {"x": 1}
    assert report["speed"] == {"given": "2.0"}
    assert report["ok"] is False
    assert [len(item) - 2 for item in saved] == [1, 2, 3, 4, 5], "the report is written after each part"
    assert saved[-1] == report | {"seconds": saved[-1]["seconds"]}
    json.dumps(report)


def test_all_is_well_only_if_all_ran_and_nothing_is_wrong():
    def is_ok(*checks: str, budget_s: float = 900) -> bool:
        found = run_parts(checks, [], lambda _: None, budget_s=budget_s, command=scripted)
        assert set(found) == {*checks, "ok", "seconds"}
        return found["ok"]

    assert is_ok("fine")
    assert not is_ok("fine", "wrong")
    assert not is_ok("fine", budget_s=0)


def test_a_part_that_never_ends_is_stopped():
    assert "stopped after 1 s" in run_in_process("hangs", Given(limit_s=1.0), scripted)["error"]
    assert "skipped" in run_in_process("fine", Given(limit_s=0.0), scripted)


def test_a_part_is_told_what_it_needs(tmp_path: Path):
    """Ceilings that do not reach the part which compares with them."""
    ceilings = Device(name="measured", bytes_per_s=4e12, flops_per_s=9e14)
    command = _command("attention", tmp_path / "x.json", Given(limit_s=7.5, ceilings=ceilings))
    options = dict(zip(command[3::2], command[4::2], strict=True))
    assert options["--part"] == "attention"
    assert float(options["--limit-s"]) == 7.5
    assert Device(**json.loads(options["--ceilings"])) == ceilings
    assert not set(CHECKS) & set(MEASUREMENTS)
    assert next(iter(MEASUREMENTS)) == "ceilings"


def test_the_workload_is_the_same_every_time():
    lengths = draw_lengths(256, least=100, most=1024, seed=0)
    assert lengths == draw_lengths(256, least=100, most=1024, seed=0)
    assert len(lengths.prompts) == len(lengths.outputs) == 256
    assert min(lengths.prompts + lengths.outputs) >= 100
    assert max(lengths.prompts + lengths.outputs) <= 1024


def test_kv_reads_are_those_of_a_loop():
    lengths = Lengths(prompts=[3, 5], outputs=[4, 1])
    # Tokens 2 to 4 of the first see 4, 5 and 6; the second ends with the token from its prompt.
    assert lengths.num_kv_reads == 4 + 5 + 6
    device = Device(name="x", bytes_per_s=10.0, flops_per_s=100.0)
    floor = roofline_s(lengths, device, weight_bytes=7, kv_bytes_per_token=2, flops_per_token=50)
    assert floor == pytest.approx((15 * 2 + 4 * 7) / 10 + 8 * 50 / 100)


def test_shares_of_the_ceiling():
    found = share_of_ceiling(Cost(num_bytes=10, num_flops=10), 2.0, Device(name="x", bytes_per_s=10, flops_per_s=100))
    assert (found["share"], found["bound"], found["gb_per_s"]) == (0.5, "memory", 5e-9)


@pytest.mark.parametrize(("shape", "millions"), [(QWEN3_600M, 596), (LLAMA_8B, 7505)])
def test_weights_are_counted(shape: dict[str, int], millions: int):
    assert round(_num_weights(shape) / 1e6) == millions


def test_random_weights_run_to_the_end(tmp_path: Path):
    """The loop loses a sequence, or the limit leaves blocks behind."""
    shape = LLAMA_8B | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 100}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = EngineConfig(model="x", dtype="float32", kernels="reference", max_model_len=64)
    runner = ModelRunner(config, write_config(tmp_path, shape), weights=random_weights(CPU))
    scheduler = make_scheduler(config, runner)
    lengths = Lengths(prompts=[3, 20, 7], outputs=[5, 2, 9])
    run = run_sequences(scheduler, runner, sequences(lengths, vocab_size=100, seed=0), limit_s=60)
    assert run.is_complete
    assert run.num_output_tokens == 16
    cut = run_sequences(scheduler, runner, sequences(lengths, vocab_size=100, seed=0), limit_s=0)
    assert not cut.is_complete
    assert scheduler.kv_cache_manager.usage.num_referenced == 0


def test_kernels_are_checked(monkeypatch: pytest.MonkeyPatch):
    """The check itself is wrong, or finds nothing wrong whatever a kernel does."""
    small = {"shapes": [(4, 2, 16, 16)], "lengths": [(1, 5), (3, 9)], "options": [{"window": 4}]}
    assert check_kernels(CPU, [torch.float16], **small)["failed"] == []
    monkeypatch.setattr(TritonKernels, "norm_heads", lambda *args: None)
    (failed,) = check_kernels(CPU, [torch.float32], **small)["failed"]
    assert failed["kernel"].startswith("norm_heads")


@pytest.mark.slow
def test_parity_is_checked():
    """Prompts in chunks beside decode, against transformers."""
    found = check_parity("cpu", Lengths(prompts=[5, 70], outputs=[2, 2]), block_size=16)
    assert found == {"num_tokens": 4, "failed": []}


@pytest.mark.slow
def test_swap_is_checked():
    """Sequences that never leave the device; or what comes back is not what went."""
    found = check_swap("cpu", Lengths(prompts=[13, 30, 17], outputs=[5] * 3), num_blocks=5, block_size=16)
    assert found["failed"] == []
    assert found["num_tokens"] == 15
    assert found["num_blocks_in"] > 0
    idle = check_swap("cpu", Lengths(prompts=[3], outputs=[2]), num_blocks=9, block_size=16)
    assert idle["failed"] == [{"swapped": "nothing"}]


def test_the_rate_of_swapping_is_measured():
    shape = QWEN3_600M | {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 16, "hidden_size": 64}
    found = measure_swap(CPU, TritonKernels(), shape=shape, num_blocks=3, num_rounds=1)
    assert found["num_bytes"] == 3 * 16 * 2 * 16 * 2
    assert all(found[f"{name}_gb_per_s"] > 0 for name in ("out", "in", "pinned_copy"))
