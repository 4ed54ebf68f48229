"""``python -m pagedllm.bench.gpu_check``: what can only be shown on a GPU, in under six minutes, as one JSON.

Needs torch, triton, transformers, safetensors, tokenizers and numpy, and no network. Kernels against torch by the 2x
rule; attention against the copy and matrix rates measured in the same run; the engine against transformers on a tiny
model; CUDA graphs against the ordinary way; throughput of two models' shapes with random weights. A part that fails or
finds something wrong is in the JSON too, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pagedllm_kernels.cost import Device

from ..compute.model_runner import ModelRunner
from ..config import EngineConfig
from .gpu_kernels import check_kernels, measure_attention, measure_ceilings
from .gpu_parity import check_graphs, check_parity
from .gpu_workloads import (
    LLAMA_8B,
    QWEN3_600M,
    Lengths,
    draw_lengths,
    make_scheduler,
    random_weights,
    roofline_s,
    run_sequences,
    sequences,
    write_config,
)  # fmt: skip

__all__ = ["main", "run_parts"]

_BUDGET_S = 330.0
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Parts:
    """What is run, in order; each gets the seconds that are left."""

    device: torch.device

    def all(self) -> dict[str, Callable[[float], Any]]:
        ceilings: list[Device] = []

        def measure(_: float) -> dict[str, Any]:
            ceilings.append(measure_ceilings(self.device))
            return asdict(ceilings[0])

        def throughput(shape: dict[str, Any], lengths: Lengths, share: float) -> Callable[[float], Any]:
            return lambda left: measure_throughput(shape, lengths, ceilings[0], limit_s=left * share)

        return {
            "ceilings": measure,
            "kernels": lambda _: check_kernels(self.device, _DTYPES),
            "attention": lambda _: measure_attention(self.device, ceilings[0]),
            "parity": lambda _: check_parity("cuda"),
            "graphs": lambda _: check_graphs("cuda"),
            "qwen3-0.6b": throughput(QWEN3_600M, draw_lengths(256, least=100, most=1024, seed=0), 0.6),
            "llama-3.1-8b": throughput(LLAMA_8B, draw_lengths(64, least=100, most=512, seed=0), 0.8),
        }


def measure_throughput(shape: dict[str, Any], lengths: Lengths, ceilings: Device, *, limit_s: float) -> dict[str, Any]:
    """Tokens per second of random weights, all requests at once, and their share of the roofline if all ended."""
    config = EngineConfig(
        model="random", device="cuda", dtype="bfloat16", max_num_seqs=256, max_num_batched_tokens=8192,
        max_model_len=4096,
    )  # fmt: skip
    device = torch.device("cuda", 0)
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
    work = sequences(lengths, vocab_size=shape["vocab_size"], seed=0)
    run = run_sequences(scheduler, runner, work, limit_s=limit_s)
    return {
        **asdict(run),
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


def run_parts(parts: Mapping[str, Callable[[float], Any]], *, budget_s: float) -> dict[str, Any]:
    """Run parts one after the other; each result, or why there is none.

    Returns:
        By name what each part returned, ``{"error": …}`` or ``{"skipped": …}``, and ``"ok"``: whether all ran and
        none has a non-empty ``"failed"``.
    """
    start, report = time.monotonic(), {}
    for name, part in parts.items():
        left = budget_s - (time.monotonic() - start)
        print(f"{name} ({left:.0f} s left)", file=sys.stderr, flush=True)
        try:
            report[name] = part(left) if left > 0 else {"skipped": f"{budget_s:.0f} s are over"}
        except Exception as error:  # the other parts' results are worth having
            report[name] = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    bad = [name for name, result in report.items() if {"error", "skipped"} & set(result) or result.get("failed")]
    return {**report, "ok": not bad, "seconds": time.monotonic() - start}


def main(arguments: list[str] | None = None) -> int:
    """Run the check; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pagedllm.bench.gpu_check", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the report goes besides the standard output")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no GPU is available to torch: nothing was checked or measured", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0)
    machine = {
        "gpu": torch.cuda.get_device_name(device),
        "capability": list(torch.cuda.get_device_capability(device)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    report = {"machine": machine, **run_parts(_Parts(device).all(), budget_s=_BUDGET_S)}
    text = json.dumps(report, indent=1)
    if options.json is not None:
        options.json.write_text(text + "\n")
    print(text)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
