"""The launches of real models at real sizes, on tensors without memory: what compile_check compiles and counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cost import Cost, attention_cost, elementwise_cost
from .activation import plan_gated_activation
from .call import KernelCall
from .kv_copy import plan_copy
from .paged_attention import plan_paged_attention
from .rms_norm import plan_add_rms_norm, plan_norm_heads
from .rope import plan_rope_store
from .sampling import plan_sample

__all__ = ["Case", "ModelShape", "model_cases"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What kernels see of a model."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_head_norms: bool = False
    gelu: bool = False
    window: int | None = None
    soft_cap: float | None = None


MODELS = (
    ModelShape(
        name="Qwen3-0.6B", num_layers=28, hidden_size=1024, intermediate_size=3072, vocab_size=151_936,
        num_heads=16, num_kv_heads=8, head_dim=128, has_head_norms=True,
    ),
    ModelShape(
        name="Llama-3.1-8B", num_layers=32, hidden_size=4096, intermediate_size=14_336, vocab_size=128_256,
        num_heads=32, num_kv_heads=8, head_dim=128,
    ),
    ModelShape(
        name="SmolLM2-135M", num_layers=30, hidden_size=576, intermediate_size=1536, vocab_size=49_152,
        num_heads=9, num_kv_heads=3, head_dim=64,
    ),
    ModelShape(
        name="Phi-3-mini", num_layers=32, hidden_size=3072, intermediate_size=8192, vocab_size=32_064,
        num_heads=32, num_kv_heads=32, head_dim=96, window=2047,
    ),
    ModelShape(
        name="Gemma-2-2b", num_layers=26, hidden_size=2304, intermediate_size=9216, vocab_size=256_000,
        num_heads=8, num_kv_heads=4, head_dim=256, gelu=True, window=4096, soft_cap=50.0,
    ),
    ModelShape(
        name="Gemma-2-27b", num_layers=46, hidden_size=4608, intermediate_size=36_864, vocab_size=256_000,
        num_heads=32, num_kv_heads=16, head_dim=128, gelu=True, window=4096, soft_cap=50.0,
    ),
)  # fmt: skip
"""One for each way through the kernels."""

# Sequences, and new and all tokens of each: single tokens of few and of many, a short and a long prompt.
_ATTENTION = {
    "decode 1 x 4096": [(1, 4096)],
    "decode 64 x 4096": [(1, 4096)] * 64,
    "decode 256 x 1024": [(1, 1024)] * 256,
    "prefill 1 x 40": [(40, 40)],
    "prefill 1 x 512": [(512, 512)],
    "prefill 8 x 4096": [(4096, 4096)] * 8,
}
_NUM_TOKENS = 8192
_NUM_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class Case:
    """A launch with what it must move and multiply; None where another launch of the same operation counts it."""

    name: str
    call: KernelCall
    cost: Cost | None


def model_cases(model: ModelShape, dtype: torch.dtype, block_size: int) -> Iterator[Case]:
    """Every kernel as the model launches it."""
    for name, lengths in _ATTENTION.items():
        yield from _attention_cases(name, model, dtype, block_size, lengths)
    if dtype == torch.float32:
        return  # for tests; the other kernels compute in float32 whatever they read
    yield from _layer_cases(model, dtype, block_size)
    yield _sampling_case(model)


def _attention_cases(
    name: str, model: ModelShape, dtype: torch.dtype, block_size: int, lengths: list[tuple[int, int]]
) -> Iterator[Case]:
    num_tokens, num_seqs = sum(new for new, _ in lengths), len(lengths)
    width = model.num_heads * model.head_dim
    max_num_blocks = max(-(-total // block_size) for _, total in lengths)
    cache = _meta(num_seqs * max_num_blocks, block_size, model.num_kv_heads, model.head_dim, dtype=dtype)
    calls = plan_paged_attention(
        _meta(num_tokens, width + 2 * model.num_kv_heads * model.head_dim, dtype=dtype),
        cache,
        cache,
        _meta(num_seqs, max_num_blocks, dtype=torch.int32),
        _meta(num_seqs + 1, dtype=torch.int32),
        _meta(num_seqs, dtype=torch.int32),
        model.head_dim**-0.5,
        _meta(num_tokens, width, dtype=dtype),
        window=model.window,
        soft_cap=model.soft_cap,
    )
    heads = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
    cost = attention_cost(lengths, **heads, itemsize=dtype.itemsize, window=model.window)
    # The first does the work. After it come the merge, and in a mixed batch the decode that finds nothing to do.
    for call in calls:
        yield Case(name=name, call=call, cost=cost if call is calls[0] else None)


def _layer_cases(model: ModelShape, dtype: torch.dtype, block_size: int) -> Iterator[Case]:
    tokens, size = _NUM_TOKENS, model.intermediate_size
    heads, kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim
    qkv = _meta(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    cache = _meta(1024, block_size, kv_heads, head_dim, dtype=dtype)
    stream, added = _meta(tokens, model.hidden_size, dtype=torch.float32), _meta(tokens, model.hidden_size, dtype=dtype)
    weight, head_weight = (_meta(size, dtype=torch.float32) for size in (model.hidden_size, head_dim))
    indices = _meta(tokens, dtype=torch.int64)
    table = _meta(tokens, head_dim, dtype=torch.float32)
    # The stream is read and written in float32.
    yield Case(
        name="add and norm",
        call=plan_add_rms_norm(stream, added, weight, 1e-5, added),
        cost=elementwise_cost(stream.numel(), 8 + 2 * dtype.itemsize),
    )
    if model.has_head_norms:
        yield Case(
            name="norm of heads",
            call=plan_norm_heads(qkv, head_weight, head_weight, kv_heads, 1e-5),
            cost=elementwise_cost(tokens * (heads + kv_heads) * head_dim, 2 * dtype.itemsize),
        )
    rotated = (heads + kv_heads) + 2 * kv_heads  # written, beside all that is read
    yield Case(
        name="rotate and store",
        call=plan_rope_store(qkv, indices, table, cache, cache, indices),
        cost=elementwise_cost(qkv.numel() + tokens * rotated * head_dim, dtype.itemsize),
    )
    out = _meta(tokens, size, dtype=dtype)
    yield Case(
        name="gate",
        call=plan_gated_activation(_meta(tokens, 2 * size, dtype=dtype), out, gelu=model.gelu),
        cost=elementwise_cost(out.numel(), 3 * dtype.itemsize),
    )
    pool = _meta(2 * model.num_layers, 1024, block_size, kv_heads, head_dim, dtype=dtype)
    ids = _meta(64, dtype=torch.int32)
    yield Case(
        name="copy 64 blocks",
        call=plan_copy(pool, pool, ids, ids),
        cost=elementwise_cost(pool.numel() // 1024 * 64, 2 * dtype.itemsize),
    )


def _sampling_case(model: ModelShape) -> Case:
    logits = _meta(_NUM_ROWS, model.vocab_size, dtype=torch.float32)
    numbers, integers = (_meta(_NUM_ROWS, dtype=dtype) for dtype in (torch.float32, torch.int64))
    keys = _meta(_NUM_ROWS, 2, dtype=torch.int64)
    call = plan_sample(logits, numbers, integers, numbers, numbers, keys, integers)
    return Case(name=f"sample {_NUM_ROWS} rows", call=call, cost=elementwise_cost(logits.numel(), 4))


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
