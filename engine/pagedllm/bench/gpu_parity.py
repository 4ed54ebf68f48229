"""The engine on a GPU against transformers, and CUDA graphs against the ordinary way, on a tiny random model."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ..compute.model_runner import ModelRunner
from ..compute.models.config import ModelConfig
from ..config import EngineConfig
from ..control.host_tier import HostTier
from ..files.locate import ModelFiles
from .gpu_workloads import Lengths, make_scheduler, run_sequences, sequences, write_config

__all__ = ["check_graphs", "check_parity", "check_swap"]

_TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2000,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
    "rope_theta": 10_000.0,
}  # fmt: skip
_KV_BYTES_PER_TOKEN = 2 * 4 * 2 * 64 * 4  # keys and values, layers, heads, numbers, float32
_LENGTHS = Lengths(prompts=[5, 40, 17, 100, 33, 64, 3], outputs=[24] * 7)
_NEAR_TIE = 1e-3
"""Gap between the two best logits below which float32 on a GPU may choose either."""


def check_parity(device: str, lengths: Lengths = _LENGTHS, **options: Any) -> dict[str, Any]:
    """Greedy tokens in float32, batched and in chunks, against one forward pass of transformers over each text."""
    reference = _reference(device)
    texts, _ = _generate(reference, device, lengths, **options)
    return _judge(reference, device, lengths, texts)


def check_swap(device: str, lengths: Lengths = _LENGTHS, *, num_blocks: int = 24, **options: Any) -> dict[str, Any]:
    """As ``check_parity``, with so few blocks that sequences must go to the host and come back."""
    reference = _reference(device)
    pool_bytes = num_blocks * options.get("block_size", 16) * _KV_BYTES_PER_TOKEN
    swapping = {"kv_cache_memory_bytes": pool_bytes, "swap_space": 2**-6, "preemption_mode": "swap"}
    texts, host = _generate(reference, device, lengths, **swapping, **options)
    found = _judge(reference, device, lengths, texts)
    if not host.num_copied_in:
        found["failed"].append({"swapped": "nothing"})
    return {**found, "num_blocks_out": host.num_copied_out, "num_blocks_in": host.num_copied_in}


def _judge(reference: Any, device: str, lengths: Lengths, texts: list[Any]) -> dict[str, Any]:
    """Each token against the logits that transformers has there."""
    failed, num_tokens = [], 0
    for i, (prompt, text) in enumerate(zip(lengths.prompts, texts, strict=True)):
        with torch.inference_mode():
            logits = reference(torch.tensor([text[:-1]], device=device), use_cache=False).logits[0, prompt - 1 :]
        best = logits.float().topk(2)
        for j, token_id in enumerate(text[prompt:]):
            num_tokens += 1
            gap = float(best.values[j, 0] - best.values[j, 1])
            if token_id != int(best.indices[j, 0]) and gap >= _NEAR_TIE:
                failed.append({"sequence": i, "token": j, "gap": gap})
    return {"num_tokens": num_tokens, "failed": failed}


def check_graphs(device: str, lengths: Lengths = _LENGTHS) -> dict[str, Any]:
    """The same tokens with graphs and without, greedy and sampled."""
    reference = _reference(device)
    failed = []
    for temperature in (0.0, 1.0):
        texts = [
            _generate(reference, device, lengths, temperature=temperature, enforce_eager=eager)[0]
            for eager in (False, True)
        ]
        failed += [{"sequence": i, "temperature": temperature} for i, pair in enumerate(zip(*texts, strict=True))
                   if pair[0] != pair[1]]  # fmt: skip
    return {"num_texts": 2 * len(lengths.prompts), "failed": failed}


def _reference(device: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(**_TINY, initializer_range=0.2)
        model = AutoModelForCausalLM.from_config(config).float()  # older versions call the dtype otherwise
    return model.eval().requires_grad_(False).to(device)


def _generate(
    reference: Any, device: str, lengths: Lengths, *, temperature: float = 0.0, **options: Any
) -> tuple[list[Any], HostTier]:
    """The engine's texts, prompts included, with the weights of ``reference``; and what went to the host."""

    def weights(_files: ModelFiles, _config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, tensor) for name, tensor in reference.state_dict().items() if name != "lm_head.weight")

    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 2**24}
    config = EngineConfig(model="tiny", device=device, dtype="float32", kernels="triton", **(defaults | options))
    with tempfile.TemporaryDirectory() as folder:
        runner = ModelRunner(config, write_config(Path(folder), _TINY), weights=weights)
    work = sequences(lengths, vocab_size=_TINY["vocab_size"], seed=3, temperature=temperature)
    scheduler = make_scheduler(config, runner)
    # The part is stopped as a whole where it takes too long: half a text would seem to be right.
    run_sequences(scheduler, runner, work, limit_s=math.inf)
    return [sequence.token_ids for sequence in work], scheduler.kv_cache_manager.host
