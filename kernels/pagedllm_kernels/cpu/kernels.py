"""The operations on a CPU, in C++."""

from __future__ import annotations

from collections.abc import Sequence as List

import torch
from torch import Tensor

from ..interface import LayerStack, Linear, StackLayer, StackShape
from ..rms_norm import norm_heads
from ..sampling import sample
from .build import detect_isa, load_library

__all__ = ["CPUKernels"]

_MULTIPLE = 16
_PANEL = 32
_TIMED = ("add_rms_norm", "linear", "rope_store", "paged_attention")  # as stack.h counts them
_DTYPES = (torch.float32, torch.bfloat16)


class CPUKernels:
    """Implements ``Kernels`` and ``StackKernels``.

    Raises:
        KernelsUnavailableError: They cannot be compiled or loaded here.
    """

    name = "cpu"

    def __init__(self) -> None:
        load_library(detect_isa())

    @staticmethod
    def refusal(dtype: torch.dtype, *, head_dim: int, hidden_size: int, intermediate_size: int) -> str | None:
        """Why these kernels cannot run a model of that dtype and shape; None if they can."""
        if dtype not in _DTYPES:
            return f"dtype {dtype} is not one of float32 and bfloat16"
        sizes = {"head_dim": head_dim, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
        odd = [f"{name}={size}" for name, size in sizes.items() if size % _MULTIPLE]
        return f"{odd[0]} is not a multiple of {_MULTIPLE}" if odd else None

    def prepare_linear(self, weight: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Linear:
        return _PackedLinear(weight, bias, dtype or weight.dtype)

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        normed: Tensor = torch.ops.pagedllm_cpu.add_rms_norm(x, delta, weight, eps, dtype)
        return normed

    def norm_heads(self, qkv: Tensor, query_weight: Tensor, key_weight: Tensor, num_kv_heads: int, eps: float) -> None:
        norm_heads(qkv, query_weight, key_weight, num_kv_heads, eps)

    def rope_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        table: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        torch.ops.pagedllm_cpu.rope_store(qkv, positions, table, key_cache, value_cache, slot_mapping)

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
        tables = (block_tables, cu_seqlens_q, seq_lens)
        attended: Tensor = torch.ops.pagedllm_cpu.paged_attention(
            qkv, key_cache, value_cache, *tables, scale, window or 0, soft_cap or 0.0
        )
        return attended

    def gated_activation(self, gate_up: Tensor, *, gelu: bool) -> Tensor:
        activated: Tensor = torch.ops.pagedllm_cpu.gated_activation(gate_up, gelu)
        return activated

    def greedy(self, logits: Tensor) -> Tensor:
        if logits.dtype != torch.float32 or not logits.is_contiguous():
            return logits.argmax(dim=-1)
        token_ids: Tensor = torch.ops.pagedllm_cpu.greedy(logits)
        return token_ids

    def sample(
        self, logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, keys: Tensor
    ) -> Tensor:
        # This draw spares the noise of tokens that cannot win.
        return sample(logits, temperatures, top_ks, top_ps, min_ps, keys, draw=torch.ops.pagedllm_cpu.draw)

    def prepare_stack(self, layers: List[StackLayer], shape: StackShape) -> LayerStack | None:
        return _Stack(layers, shape) if shape.intermediate_size % _PANEL == 0 else None


class _Stack:
    """Implements ``LayerStack`` over packed products."""

    def __init__(self, layers: List[StackLayer], shape: StackShape) -> None:
        self._weights: list[Tensor | None] = []
        for layer in layers:
            products = (layer.qkv, layer.attention_output, layer.gate_up, layer.down)
            qkv, output, gate_up, down = (item for item in products if isinstance(item, _PackedLinear))
            assert output.bias is gate_up.bias is down.bias is None
            self._weights += [layer.input_norm, qkv.packed, qkv.bias, output.packed]
            self._weights += [layer.mlp_norm, gate_up.packed, down.packed]
        self._windows = [layer.window or 0 for layer in layers]
        self._shape = shape
        self._seconds = torch.zeros(len(_TIMED), dtype=torch.float64)

    @property
    def seconds(self) -> dict[str, float]:
        return dict(zip(_TIMED, self._seconds.tolist(), strict=True))

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
        shape = self._shape
        torch.ops.pagedllm_cpu.decoder_layers(
            *(hidden, self._weights, key_caches, value_caches, self._windows, positions, table, slot_mapping),
            *(block_tables, cu_seqlens_q, seq_lens, shape.num_heads, shape.intermediate_size, shape.eps, shape.scale),
            *(shape.soft_cap or 0.0, shape.gelu, self._seconds),
        )


class _PackedLinear:
    """A product in our own layout.

    The layout takes the place of the weight: unless someone else needs that, as the embedding does, there is one copy.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.packed: Tensor = torch.ops.pagedllm_cpu.pack_linear(weight)
        self.bias = None if bias is None else bias.float()
        self._num_out = weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.pagedllm_cpu.packed_linear(x, self.packed, self.bias, self._num_out, self._dtype)
        return product
