"""What a model takes of a memory, told from its configuration: no weights are read, nothing is allocated.

The same functions size the pool of an engine that starts, so that a plan is what it gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..config import EngineConfig, StepLimits
from ..errors import ConfigError
from .kv_cache import kv_bytes_per_token
from .memory import fit_limits, fit_limits_to_gpu, gpu_pool_bytes, num_blocks_for, pool_bytes, wanted_model_len
from .models.config import ModelConfig
from .weights.names import expected_shapes, norm_names

__all__ = ["GPUMemory", "MemoryPlan", "SequencesThatFit", "activation_bytes", "plan_memory", "weights_bytes"]

_FLOAT32_BYTES = 4
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class GPUMemory:
    """A GPU to plan for.

    Args:
        memory_bytes: Of the whole device.
        utilization: Share of it that the engine may take, above 0 and at most 1.
    """

    memory_bytes: int
    utilization: float


@dataclass(frozen=True, kw_only=True)
class SequencesThatFit:
    """How many sequences of one length the KV pool holds at a time.

    Args:
        num_tokens: Of each, prompt and completion together.
        num_blocks: That one takes.
        num_paged: Sequences, where each has the blocks that it fills.
        num_reserved: Sequences, were ``max_model_len`` tokens reserved for each.
        unused_share_paged: Part of the allocated slots that holds no token, 0 to 1.
        unused_share_reserved: Likewise with reservation.
    """

    num_tokens: int
    num_blocks: int
    num_paged: int
    num_reserved: int
    unused_share_paged: float
    unused_share_reserved: float


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What a model takes, and what that leaves for sequences.

    Args:
        usable_bytes: What the engine may take of a GPU; None on a CPU, where the pool has a size of its own.
        weights_bytes: Of the weights, in ``dtype``; norms and rotary factors in float32.
        activation_bytes: Estimate of the most that one step takes besides weights and KV.
        pool_bytes: Of the KV pool; negative by what weights and activations lack.
        kv_bytes_per_token: Over all layers.
        block_bytes: Of ``block_size`` tokens.
        max_model_len: Wanted.
        fitting_model_len: Longest sequence that the pool holds, at most ``max_model_len``.
        max_num_seqs: Most sequences in a step, as the engine will have it.
        max_num_batched_tokens: Likewise tokens.
        sequences: For each length asked about.
        problems: Why an engine cannot start like this, each with what to change; empty if it can.
        advice: What an engine would change, and what to change so that ``max_num_seqs`` sequences of the lengths asked
            about fit.
    """

    architecture: str
    dtype: str
    num_parameters: int
    memory_bytes: int | None
    usable_bytes: int | None
    weights_bytes: int
    activation_bytes: int
    pool_bytes: int
    kv_bytes_per_token: int
    block_size: int
    block_bytes: int
    num_blocks: int
    max_model_len: int
    fitting_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    sequences: tuple[SequencesThatFit, ...]
    problems: tuple[str, ...]
    advice: tuple[str, ...]


def num_parameters(model: ModelConfig) -> int:
    """Numbers that a checkpoint of the model has."""
    return sum(math.prod(shape) for shape in expected_shapes(model).values())


def weights_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of what ``allocate_weights`` allocates.

    Kernels that keep weights in a layout of their own hold a tied embedding a second time, as output projection.
    """
    shapes, norms = expected_shapes(model), norm_names(model)
    in_float32 = norms | {"rope_freqs"}
    # Allocated always, in a checkpoint or not.
    shapes = {**shapes, "rope_freqs": (model.head_dim // 2,)}
    return sum(
        math.prod(shape) * (_FLOAT32_BYTES if name in in_float32 else dtype.itemsize) for name, shape in shapes.items()
    )


def activation_bytes(model: ModelConfig, dtype: torch.dtype, limits: StepLimits, *, max_model_len: int) -> int:
    """Estimate of what one step takes at most besides weights and KV cache; fused kernels are assumed.

    A layer's tensors that are alive at once, of its wider half: the residual stream in float32, what is added to it,
    its norm, and queries, keys, values and outputs of attention, or gate, up and their product. Besides them logits in
    float32, with a copy that sampling changes, for every sequence, and the rotary table. A request for the log
    probabilities of its prompt takes more: a row of logits for each of its tokens in a step.
    """
    hidden, num_q = model.hidden_size, model.num_heads * model.head_dim
    attention = (num_q + 2 * model.num_kv_heads * model.head_dim) + num_q + hidden
    mlp = 3 * model.intermediate_size
    per_token = _FLOAT32_BYTES * hidden + dtype.itemsize * (2 * hidden + max(attention, mlp))
    logits = 2 * _FLOAT32_BYTES * limits.max_num_seqs * model.vocab_size
    return limits.max_num_batched_tokens * per_token + logits + _FLOAT32_BYTES * max_model_len * model.head_dim


def plan_memory(
    model: ModelConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    *,
    gpu: GPUMemory | None = None,
    lengths: Sequence[int] = (),
) -> MemoryPlan:
    """Plan an engine.

    Args:
        model: Its shape.
        config: The engine's; without ``gpu`` its KV pool is that of a CPU engine on this machine.
        dtype: Of weights and KV cache.
        gpu: The GPU to plan for.
        lengths: In tokens, of sequences that should fit ``max_num_seqs`` times.

    Raises:
        ConfigError: ``max_model_len`` is above the model's limit, or a length above ``max_model_len``.
    """
    max_model_len = wanted_model_len(config, model.max_position_embeddings)
    for length in lengths:
        if not 1 <= length <= max_model_len:
            raise ConfigError.for_value("seq_len", length, f"must be in 1..{max_model_len}, the max_model_len")
    split = _split(model, config, dtype, gpu, max_model_len)
    fitting_len = min(max_model_len, split.num_blocks * config.block_size)
    return MemoryPlan(
        architecture=model.architecture,
        dtype=str(dtype).removeprefix("torch."),
        num_parameters=num_parameters(model),
        memory_bytes=None if gpu is None else gpu.memory_bytes,
        usable_bytes=None if gpu is None else int(gpu.memory_bytes * gpu.utilization),
        weights_bytes=split.weights_bytes,
        activation_bytes=split.activation_bytes,
        pool_bytes=split.pool_bytes,
        kv_bytes_per_token=split.block_bytes // config.block_size,
        block_size=config.block_size,
        block_bytes=split.block_bytes,
        num_blocks=split.num_blocks,
        max_model_len=max_model_len,
        fitting_model_len=fitting_len,
        max_num_seqs=split.limits.max_num_seqs,
        max_num_batched_tokens=split.limits.max_num_batched_tokens,
        sequences=tuple(
            _fit(length, split.num_blocks, config.block_size, max_model_len)
            for length in lengths or _default_lengths(max_model_len)
        ),
        problems=tuple(_problems(split, dtype, config, max_model_len)),
        advice=tuple(_advice(split, config, max_model_len, lengths)),
    )


@dataclass(frozen=True, kw_only=True)
class _Split:
    """A memory divided, and how to have more of it for KV.

    Args:
        pool_bytes_on: Of a GPU with so many bytes; None for a CPU.
        wanted: Limits of a step before they are fitted to the memory.
        limits: And after.
    """

    weights_bytes: int
    activation_bytes: int
    pool_bytes: int
    block_bytes: int
    pool_bytes_on: Callable[[int], int] | None
    wanted: StepLimits
    limits: StepLimits

    @property
    def num_blocks(self) -> int:
        return max(self.pool_bytes, 0) // self.block_bytes

    def how_to_have(self, num_blocks: int) -> str:
        """What gives a pool of so many blocks."""
        needed = num_blocks * self.block_bytes
        if self.pool_bytes_on is None:
            return f"raise kv_cache_memory_bytes to {needed}"
        # A larger one may have larger steps too, so that only trying tells.
        tenths = 1
        while self.pool_bytes_on(tenths * _GIB // 10) < needed:
            tenths += 1
        return f"take a GPU of {tenths / 10:.1f} GiB"


def _split(
    model: ModelConfig, config: EngineConfig, dtype: torch.dtype, gpu: GPUMemory | None, max_model_len: int
) -> _Split:
    weights, per_token = weights_bytes(model, dtype), kv_bytes_per_token(model, dtype)
    block_bytes = per_token * config.block_size

    def activations(limits: StepLimits) -> int:
        return activation_bytes(model, dtype, limits, max_model_len=max_model_len)

    def fit(memory_bytes: int) -> tuple[StepLimits, int]:
        assert gpu is not None
        estimate = partial(
            gpu_pool_bytes, memory_bytes=memory_bytes, utilization=gpu.utilization, weights_bytes=weights
        )
        return fit_limits_to_gpu(
            config, lambda limits: estimate(activation_bytes=activations(limits)), block_bytes=block_bytes
        )

    wanted = config.step_limits("cpu" if gpu is None else "cuda")
    if gpu is None:
        limits, pool = wanted, pool_bytes(config, wanted, bytes_per_token=per_token, max_model_len=max_model_len)
    else:
        limits, pool = fit(gpu.memory_bytes)
    return _Split(
        weights_bytes=weights,
        activation_bytes=activations(limits),
        pool_bytes=pool,
        block_bytes=block_bytes,
        pool_bytes_on=None if gpu is None else lambda memory_bytes: fit(memory_bytes)[1],
        wanted=wanted,
        limits=fit_limits(config, limits, max(pool, 0) // block_bytes),
    )


def _fit(length: int, num_blocks: int, block_size: int, max_model_len: int) -> SequencesThatFit:
    own, reserved = num_blocks_for(length, block_size), num_blocks_for(max_model_len, block_size)
    return SequencesThatFit(
        num_tokens=length,
        num_blocks=own,
        num_paged=num_blocks // own,
        num_reserved=num_blocks // reserved,
        unused_share_paged=1 - length / (own * block_size),
        unused_share_reserved=1 - length / (reserved * block_size),
    )


def _default_lengths(max_model_len: int) -> list[int]:
    return sorted({max(max_model_len // 16, 1), max(max_model_len // 4, 1), max_model_len})


def _problems(split: _Split, dtype: torch.dtype, config: EngineConfig, max_model_len: int) -> Iterable[str]:
    needed = num_blocks_for(max_model_len, config.block_size)
    fitting_len = split.num_blocks * config.block_size
    if not split.num_blocks:
        change = split.how_to_have(needed)
        if split.pool_bytes_on is not None:
            change += ", lower max_num_batched_tokens or max_num_seqs, or take a smaller model"
            change += " or dtype (bfloat16)" if dtype.itemsize > 2 else ""
        yield f"there is no room for a KV block of {split.block_bytes} bytes: {change}"
    elif config.max_model_len is not None and fitting_len < max_model_len:
        yield f"max_model_len={max_model_len}: lower it to {fitting_len}, or {split.how_to_have(needed)}"


def _advice(split: _Split, config: EngineConfig, max_model_len: int, lengths: Sequence[int]) -> Iterable[str]:
    if not split.num_blocks:
        return
    fitting_len = split.num_blocks * config.block_size
    if config.max_model_len is None and fitting_len < max_model_len:
        needed = num_blocks_for(max_model_len, config.block_size)
        yield (
            f"max_model_len will be lowered from the model's {max_model_len} to {fitting_len}; for the model's "
            f"{split.how_to_have(needed)}"
        )
    if split.limits != split.wanted:
        yield (
            f"max_num_seqs and max_num_batched_tokens will be lowered from {split.wanted.max_num_seqs} and "
            f"{split.wanted.max_num_batched_tokens} to {split.limits.max_num_seqs} and "
            f"{split.limits.max_num_batched_tokens}, which the memory holds"
        )
    max_num_seqs = split.wanted.max_num_seqs
    for length in lengths:
        own = num_blocks_for(length, config.block_size)
        num_fitting = split.num_blocks // own
        if num_fitting < max_num_seqs:
            lower = f"lower max_num_seqs to {num_fitting}" if num_fitting else "shorten them"
            yield (
                f"max_num_seqs={max_num_seqs} sequences of {length} tokens do not fit at a time, {num_fitting} "
                f"do: {lower}, or {split.how_to_have(max_num_seqs * own)}"
            )
