"""``python -m pagedllm.bench.gpu_check``: what can only be shown on a GPU, in under six minutes, as one JSON.

Needs torch, triton, transformers, safetensors, tokenizers and numpy, and no network. Kernels against torch by the 2x
rule; the engine against transformers on a tiny model; CUDA graphs against the ordinary way; tokens after a stay in host
memory; attention against the copy and matrix rates measured in the same run; throughput of two models' shapes with
random weights.

Every part is a process of its own, so that a kernel that takes the GPU's context with it, or never ends, costs its own
result only. The JSON is written after each; a part that fails or finds something wrong is in it, and the exit status is
then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pagedllm_kernels.cost import Device
from pagedllm_kernels.triton.kernels import TritonKernels

from ..compute.model_runner import ModelRunner
from ..config import EngineConfig
from .gpu_kernels import SHAPES, check_kernels, measure_attention, measure_ceilings
from .gpu_parity import check_graphs, check_parity, check_swap
from .gpu_workloads import (
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

__all__ = ["CHECKS", "MEASUREMENTS", "Given", "main", "run_in_process", "run_parts"]

_BUDGET_S = 330.0
_CHECKS_S = 150.0
_MAX_PROCESSES = 18
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ERROR_CHARS = 2000


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a part is given.

    Args:
        limit_s: Seconds after which it is stopped.
        ceilings: What the device reaches, once it is measured.
    """

    limit_s: float
    ceilings: Device | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    @property
    def measured(self) -> Device:
        """The ceilings.

        Raises:
            RuntimeError: Measuring them failed.
        """
        if self.ceilings is None:
            raise RuntimeError("the ceilings of the device are not known")
        return self.ceilings


Part = Callable[[Given], dict[str, Any]]


def _check_kernels_of(given: Given, *, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> dict[str, Any]:
    return check_kernels(given.device, [dtype], [shape])


# Shapes and dtypes apart: what takes long is compiling, one kernel after the other in a process.
CHECKS: dict[str, Part] = {
    **{
        f"kernels {str(dtype).removeprefix('torch.')} {shape}": partial(_check_kernels_of, dtype=dtype, shape=shape)
        for dtype in _DTYPES
        for shape in SHAPES
    },
    "parity": lambda _: check_parity("cuda"),
    "graphs": lambda _: check_graphs("cuda"),
    "swap": lambda _: check_swap("cuda"),
}
"""Run side by side: right or wrong does not depend on what else the GPU does."""

MEASUREMENTS: dict[str, Part] = {
    "ceilings": lambda given: asdict(measure_ceilings(given.device)),
    "attention": lambda given: measure_attention(given.device, given.measured),
    "swap rate": lambda given: measure_swap(given.device, TritonKernels()),
    "qwen3-0.6b": lambda given: measure_throughput(
        QWEN3_600M, draw_lengths(256, least=100, most=1024, seed=0), given.measured, limit_s=given.limit_s
    ),
    "llama-3.1-8b": lambda given: measure_throughput(
        LLAMA_8B, draw_lengths(64, least=100, most=512, seed=0), given.measured, limit_s=given.limit_s
    ),
}
"""Run one after the other."""

# Of the time that is left when it begins; 1 where there is no line.
_SHARES = {"ceilings": 0.3, "attention": 0.5, "swap rate": 0.3, "qwen3-0.6b": 0.6}


def measure_throughput(shape: dict[str, Any], lengths: Lengths, ceilings: Device, *, limit_s: float) -> dict[str, Any]:
    """Tokens per second of random weights, all requests at once, and their share of the roofline if all ended."""
    start, device = time.monotonic(), torch.device("cuda", 0)
    config = EngineConfig(
        model="random", device="cuda", dtype="bfloat16", max_num_seqs=256, max_num_batched_tokens=8192,
        max_model_len=4096,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        runner = ModelRunner(config, write_config(Path(folder), shape), weights=random_weights(device))
    num_weights = _num_weights(shape)
    floor = roofline_s(
        lengths, ceilings,
        weight_bytes=2 * num_weights, kv_bytes_per_token=runner.bytes_per_token, flops_per_token=2 * num_weights,
    )  # fmt: skip
    scheduler = make_scheduler(config, runner)
    warm = sequences(Lengths(prompts=[600] * 8, outputs=[3] * 8), vocab_size=shape["vocab_size"], seed=1)
    run_sequences(scheduler, runner, warm, limit_s=60)
    load_s = time.monotonic() - start
    work = sequences(lengths, vocab_size=shape["vocab_size"], seed=0)
    run = run_sequences(scheduler, runner, work, limit_s=max(0.9 * limit_s - load_s, 1.0))
    return {
        **asdict(run),
        "load_s": load_s,
        "num_prompt_tokens": sum(lengths.prompts),
        "output_tokens_per_s": run.num_output_tokens / run.seconds,
        "roofline_s": floor,
        "share": floor / run.seconds if run.is_complete else None,
    }


def _num_weights(shape: Mapping[str, Any]) -> int:
    """Numbers in the matrices that every token is multiplied by, the head's included."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"] * shape["head_dim"]
    kv = 2 * shape["num_key_value_heads"] * shape["head_dim"]
    layer = hidden * (2 * heads + kv + 3 * shape["intermediate_size"])
    return int(shape["num_hidden_layers"] * layer + shape["vocab_size"] * hidden)


Command = Callable[[str, Path, Given], list[str]]
"""How a part is run in a process, by its name, the file for its result, and what it is given."""


def _command(name: str, target: Path, given: Given) -> list[str]:
    options = ["--limit-s", str(given.limit_s)]
    if given.ceilings is not None:
        options += ["--ceilings", json.dumps(asdict(given.ceilings))]
    return [sys.executable, "-m", "pagedllm.bench.gpu_check", "--part", name, "--json", str(target), *options]


def run_in_process(name: str, given: Given, command: Command = _command) -> dict[str, Any]:
    """A part's result, or ``{"error": …}``, or ``{"skipped": …}`` where no time is left for it."""
    if given.limit_s <= 0:
        return {"skipped": "the time is over"}
    print(f"{name} (at most {given.limit_s:.0f} s)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        target, log = Path(folder, "result.json"), Path(folder, "log")
        with log.open("wb") as output:
            try:
                done = subprocess.run(
                    command(name, target, given), stdout=output, stderr=output, timeout=given.limit_s, check=False
                )
                reason = f"exit status {done.returncode}"
            except subprocess.TimeoutExpired:
                reason = f"stopped after {given.limit_s:.0f} s"
        if target.exists():
            result: dict[str, Any] = json.loads(target.read_text())
            return result
        return {"error": f"{reason}: {log.read_text(errors='replace')[-_ERROR_CHARS:].strip()}"}


def run_parts(
    checks: Sequence[str],
    measurements: Sequence[str],
    save: Callable[[dict[str, Any]], None],
    *,
    budget_s: float,
    command: Command = _command,
) -> dict[str, Any]:
    """Run checks side by side, then measurements one after the other, each in a process.

    Args:
        save: Told the report as it is after each part.

    Returns:
        By name what each part returned, or why it did not, and ``"ok"``: whether all ran and none has a non-empty
        ``"failed"``.
    """
    start, report, num_parts = time.monotonic(), dict[str, Any](), len(checks) + len(measurements)

    def judged() -> dict[str, Any]:
        bad = [name for name, found in report.items() if {"error", "skipped"} & set(found) or found.get("failed")]
        return {**report, "ok": not bad and len(report) == num_parts, "seconds": time.monotonic() - start}

    def note(name: str, result: dict[str, Any]) -> None:
        report[name] = result
        save(judged())

    def left() -> float:
        return budget_s - (time.monotonic() - start)

    def check(name: str) -> dict[str, Any]:
        return run_in_process(name, Given(limit_s=min(left(), _CHECKS_S - (time.monotonic() - start))), command)

    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_PROCESSES)) as pool:
        for name, result in zip(checks, pool.map(check, checks), strict=True):
            note(name, result)
    ceilings: Device | None = None
    for name in measurements:
        given = Given(limit_s=left() * _SHARES.get(name, 1.0), ceilings=ceilings)
        result = run_in_process(name, given, command)
        if name == "ceilings" and "error" not in result and "skipped" not in result:
            ceilings = Device(**result)
        note(name, result)
    return judged()


def _run_part(name: str, given: Given, target: Path) -> int:
    """In the part's own process."""
    target.write_text(json.dumps({**CHECKS, **MEASUREMENTS}[name](given)))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the check; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pagedllm.bench.gpu_check", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the report goes besides the standard output")
    parser.add_argument("--part", choices=[*CHECKS, *MEASUREMENTS], help="run this part only, in this process")
    parser.add_argument("--limit-s", type=float, default=_BUDGET_S, help="seconds for the part, or for all")
    parser.add_argument("--ceilings", type=json.loads, metavar="JSON", help="of the device, where the part needs them")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no GPU is available to torch: nothing was checked or measured", file=sys.stderr)
        return 2
    if options.part is not None:
        ceilings = None if options.ceilings is None else Device(**options.ceilings)
        target = options.json or Path("/dev/stdout")
        return _run_part(options.part, Given(limit_s=options.limit_s, ceilings=ceilings), target)
    device = torch.device("cuda", 0)
    machine = {
        "gpu": torch.cuda.get_device_name(device),
        "capability": list(torch.cuda.get_device_capability(device)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }

    def save(report: dict[str, Any]) -> None:
        if options.json is not None:
            options.json.write_text(json.dumps({"machine": machine, **report}, indent=1) + "\n")

    report = run_parts(list(CHECKS), list(MEASUREMENTS), save, budget_s=options.limit_s)
    print(json.dumps({"machine": machine, **report}, indent=1))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
