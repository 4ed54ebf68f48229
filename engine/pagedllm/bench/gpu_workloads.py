"""What the GPU check runs through the engine: random prompts, through scheduler, model and sampler, without text."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedllm_kernels.cost import Device
from pagedllm_kernels.interface import CopyKernels

from ..api import SamplingParams
from ..compute.cuda_swap import make_staged_host_cache
from ..compute.forward_batch import ForwardBatch
from ..compute.kv_cache import KVCache
from ..compute.model_runner import ModelRunner
from ..compute.models.config import ModelConfig, load_model_config
from ..compute.sampler import Sampler
from ..compute.weights.names import expected_shapes
from ..config import EngineConfig
from ..control.host_tier import BlockCopy
from ..control.kv_cache_manager import KVCacheManager
from ..control.scheduler import Scheduler
from ..control.sequence import Sequence
from ..control.swap_choice import SwapChoice
from ..files.locate import ModelFiles

__all__ = ["LLAMA_8B", "QWEN3_600M", "Lengths", "Run", "draw_lengths", "make_scheduler", "measure_swap",
           "random_weights", "roofline_s", "run_sequences", "sequences", "write_config"]  # fmt: skip

QWEN3_600M: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
    "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
}  # fmt: skip
"""Qwen3-0.6B's shape."""
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    "rope_theta": 500_000.0,
}  # fmt: skip
"""Llama-3.1-8B's shape, without its rotary scaling."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of each request."""

    prompts: list[int]
    outputs: list[int]

    @property
    def num_kv_reads(self) -> int:
        """KV tokens that single new tokens see, their own included, summed over all of them."""
        pairs = zip(self.prompts, self.outputs, strict=True)
        # The first new token comes from the prompt's own pass; each later one sees all before it.
        return sum(sum(range(prompt + 1, prompt + output)) for prompt, output in pairs)


def draw_lengths(num_seqs: int, *, least: int, most: int, seed: int) -> Lengths:
    """Prompt and output lengths, uniform and inclusive."""
    drawn = np.random.default_rng(seed).integers(least, most, (2, num_seqs), endpoint=True).tolist()
    return Lengths(prompts=drawn[0], outputs=drawn[1])


def write_config(folder: Path, shape: dict[str, Any]) -> ModelFiles:
    """A model that is only a configuration; its weights are drawn."""
    (folder / "config.json").write_text(json.dumps(shape))
    return ModelFiles("random weights", "folder", folder)


def random_weights(device: torch.device, seed: int = 0) -> Any:
    """In place of ``iter_weights``: small normal numbers, made on the device."""

    def draw(_files: ModelFiles, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        generator = torch.Generator(device).manual_seed(seed)
        for name, shape in expected_shapes(config).items():
            if name.endswith("norm.weight"):
                yield name, torch.ones(shape, device=device)
            else:
                yield name, 0.02 * torch.randn(shape, generator=generator, device=device)

    return draw


def make_scheduler(config: EngineConfig, runner: ModelRunner) -> Scheduler:
    """A scheduler over the runner's pool, without prefix cache: nothing is shared here."""
    manager = KVCacheManager(
        num_blocks=runner.pool_size.num_blocks,
        block_size=config.block_size,
        enable_prefix_caching=False,
        num_host_blocks=runner.num_host_blocks,
    )
    return Scheduler(
        manager,
        max_num_seqs=runner.limits.max_num_seqs,
        max_num_batched_tokens=runner.limits.max_num_batched_tokens,
        swap_choice=SwapChoice(
            mode=config.preemption_mode,
            bytes_per_block=runner.bytes_per_token * config.block_size,
            copy_bytes_per_s=runner.copy_bytes_per_s,
        ),
    )


def measure_swap(
    device: torch.device,
    kernels: CopyKernels,
    *,
    shape: dict[str, Any] = QWEN3_600M,
    num_blocks: int = 512,
    num_rounds: int = 5,
) -> dict[str, Any]:
    """Bytes per second of scattered KV blocks to the host and back, and of one pinned copy of as much."""
    with tempfile.TemporaryDirectory() as folder:
        model = load_model_config(write_config(Path(folder), shape))
    cache = KVCache(model, num_blocks=num_blocks, block_size=16, dtype=torch.bfloat16, device=device)
    host_cache = make_staged_host_cache(cache, num_blocks, kernels, device)
    # Scattered over the device, and side by side on the host, as they are handed out.
    order = np.random.default_rng(0).permutation(num_blocks).tolist()
    copies = {
        "out": [BlockCopy("out", block, i) for i, block in enumerate(order)],
        "in": [BlockCopy("in", i, block) for i, block in enumerate(order)],
    }
    num_bytes = cache.planes.nbytes
    plain = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    source = cache.planes.view(torch.uint8).flatten()
    runs: dict[str, Callable[[], object]] = {
        **{name: partial(host_cache.copy, items) for name, items in copies.items()},
        "pinned_copy": lambda: plain.copy_(source, non_blocking=True),
    }
    rates = {name: _rate(run, num_bytes, host_cache.synchronize, num_rounds) for name, run in runs.items()}
    return {"num_bytes": num_bytes, **{f"{name}_gb_per_s": rate / 1e9 for name, rate in rates.items()}}


def _rate(run: Callable[[], object], num_bytes: int, synchronize: Callable[[], None], num_rounds: int) -> float:
    """Bytes per second, the median of some rounds after one that does not count."""
    seconds = []
    for _ in range(num_rounds + 1):
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return num_bytes / statistics.median(seconds[1:])


def sequences(lengths: Lengths, *, vocab_size: int, seed: int, temperature: float = 0.0) -> list[Sequence]:
    """Random prompts that generate exactly their output lengths."""
    rng = np.random.default_rng(seed)
    made = []
    for i, (prompt, output) in enumerate(zip(lengths.prompts, lengths.outputs, strict=True)):
        sampling = SamplingParams(max_tokens=output, temperature=temperature, ignore_eos=True)
        made.append(
            Sequence(
                request_id=str(i),
                token_ids=rng.integers(0, vocab_size, prompt).tolist(),
                num_prompt_tokens=prompt,
                max_tokens=output,
                sampling=sampling,
                seed=seed + i,
                eos_token_ids=frozenset(),
            )
        )
    return made


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run took. It may have been cut off; ``num_output_tokens`` counts what was generated until then."""

    seconds: float
    num_steps: int
    num_output_tokens: int
    is_complete: bool


def run_sequences(scheduler: Scheduler, runner: ModelRunner, work: list[Sequence], *, limit_s: float) -> Run:
    """Run all to their ends, or until the limit; what is left is then aborted."""
    sampler = Sampler(runner.kernels)
    for sequence in work:
        scheduler.add([sequence])
    start, num_steps = time.perf_counter(), 0
    while scheduler.has_work and time.perf_counter() - start < limit_s:
        output = scheduler.schedule()
        runner.copy_blocks(output.copies)
        batch = ForwardBatch.build(output.sequences, output.nums_new_tokens, scheduler.kv_cache_manager.block_size)
        scheduler.update(output, sampler(runner.run(batch), output.sampled))
        scheduler.retire_finished()
        num_steps += 1
    seconds = time.perf_counter() - start
    is_complete = not scheduler.has_work
    for sequence in work:
        if not sequence.is_finished:
            scheduler.abort(sequence.request_id)
    scheduler.retire_finished()
    return Run(
        seconds=seconds,
        num_steps=num_steps,
        num_output_tokens=sum(sequence.num_output_tokens for sequence in work),
        is_complete=is_complete,
    )


def roofline_s(
    lengths: Lengths, device: Device, *, weight_bytes: int, kv_bytes_per_token: int, flops_per_token: int
) -> float:
    """Seconds that the device needs at least for a complete run.

    KV is read once for every token that sees it, weights once for each of the longest output's steps, and prompts are
    computed at the rate of matrix products.
    """
    num_bytes = lengths.num_kv_reads * kv_bytes_per_token + max(lengths.outputs) * weight_bytes
    return num_bytes / device.bytes_per_s + sum(lengths.prompts) * flops_per_token / device.flops_per_s
