"""The operations of a decoder layer and of sampling, as every implementation offers them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = [
    "CopyKernels",
    "Kernels",
    "KernelsUnavailableError",
    "LayerStack",
    "Linear",
    "StackKernels",
    "StackLayer",
    "StackShape",
]

Linear = Callable[[Tensor], Tensor]
"""``[num_rows, in] -> [num_rows, out]``."""


class KernelsUnavailableError(Exception):
    """Kernels that were asked for cannot run here; says why and what to install."""


class Kernels(Protocol):
    """One implementation. Sizes are those of the model; ``qkv`` has queries, keys and values side by side.

    All tensors are on one device. Dtypes are float32 or that of the weights, called the dtype below.
    """

    @property
    def name(self) -> str:
        """What ``EngineConfig.kernels`` calls it."""
        ...

    def prepare_linear(self, weight: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Linear:
        """A function that multiplies by ``weight`` [out, in] and adds ``bias`` [out]; may keep a copy of its own.

        Its result is of ``dtype``; None: that of ``weight``.
        """
        ...

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """Add ``delta`` to ``x`` in place, if there is one, and return the RMS norm of ``x``.

        Args:
            x: [num_rows, hidden_size] float32, the residual stream; changed.
            delta: As ``x``, of the dtype.
            weight: [hidden_size] float32.
            eps: Added to the mean square.
            dtype: Of the result.

        Returns:
            [num_rows, hidden_size].
        """
        ...

    def norm_heads(self, qkv: Tensor, query_weight: Tensor, key_weight: Tensor, num_kv_heads: int, eps: float) -> None:
        """RMS norm of every head of the queries and of the keys, in place.

        Args:
            qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; changed, except the values.
            query_weight: [head_dim] float32.
            key_weight: Likewise.
            num_kv_heads: Heads of the keys.
            eps: Added to the mean square.
        """
        ...

    def rope_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        table: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Rotate queries and keys in place, and store keys and values in their slots.

        Args:
            qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; changed.
            positions: [num_tokens] int64.
            table: [num_positions, head_dim] float32, of ``rope_table``.
            key_cache: [num_blocks, block_size, num_kv_heads, head_dim]; changed.
            value_cache: Likewise.
            slot_mapping: [num_tokens] int64, no slot twice. On a GPU a slot below 0 is not written: padding.
        """
        ...

    def paged_attention(
        self,
        qkv: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        scale: float,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """Attention of the queries in ``qkv``, as the module ``paged_attention`` defines it.

        Returns:
            [num_tokens, num_heads * head_dim].
        """
        ...

    def gated_activation(self, gate_up: Tensor, *, gelu: bool) -> Tensor:
        """``silu(gate) * up``, or with GELU by tanh; [num_tokens, 2 * size] -> [num_tokens, size]."""
        ...

    def greedy(self, logits: Tensor) -> Tensor:
        """The most probable token of each row, the lowest id among equals; [num_rows, vocab_size] -> [num_rows]."""
        ...

    def sample(
        self, logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, keys: Tensor
    ) -> Tensor:
        """Draw one token per row, as the function ``sampling.sample`` defines it; every implementation the same.

        All but ``logits`` may be on the CPU in any case.

        Returns:
            [num_rows] int64.
        """
        ...


@runtime_checkable
class CopyKernels(Protocol):
    """Kernels that copy many KV blocks in one launch."""

    def copy_blocks(self, source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
        """Copy the pieces of blocks in every plane.

        Args:
            source: [num_planes, num_source_blocks, ...]; a piece is contiguous, planes and blocks lie anywhere.
            target: [num_planes, num_target_blocks, ...]; likewise, changed. May be ``source``, as long as no block is
                both read and written.
            source_ids: [num_copies] int32.
            target_ids: [num_copies] int32, none twice.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class StackLayer:
    """One plain layer: what ``add_rms_norm`` and the products take, in the order of the forward pass."""

    input_norm: Tensor
    qkv: Linear
    attention_output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    window: int | None


@dataclass(frozen=True, kw_only=True)
class StackShape:
    """What all layers of a stack have in common."""

    num_heads: int
    intermediate_size: int
    eps: float
    scale: float
    soft_cap: float | None
    gelu: bool


class LayerStack(Protocol):
    """All layers of a decoder as one operation."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Time spent so far by operation, under the names of ``Kernels``; what was fused counts as the product."""
        ...

    def __call__(
        self,
        hidden: Tensor,
        key_caches: List[Tensor],
        value_caches: List[Tensor],
        positions: Tensor,
        table: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
    ) -> None:
        """Run the layers over the residual stream, [num_tokens, hidden_size] float32, which is changed.

        The rest is as the operations of ``Kernels`` take it, with the caches of all layers.
        """
        ...


@runtime_checkable
class StackKernels(Protocol):
    """Kernels that can run many layers in one go, which saves what it costs to get from one operation to the next."""

    def prepare_stack(self, layers: List[StackLayer], shape: StackShape) -> LayerStack | None:
        """The layers as one operation; None if they cannot be that, so that the operations have to serve one by one.

        Args:
            layers: Their products are those that ``prepare_linear`` of the same kernels made.
        """
        ...
