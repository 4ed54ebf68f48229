"""The one decoder of all families, over packed tokens and a paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedllm_kernels.activation import soft_cap
from pagedllm_kernels.interface import Kernels, LayerStack, Linear, StackKernels, StackLayer, StackShape
from pagedllm_kernels.rms_norm import rms_norm
from pagedllm_kernels.rope import rope_table

from ..forward_batch import ForwardBatch
from ..kv_cache import KVCache
from .config import ModelConfig
from .layers import DecoderWeights, LayerWeights

__all__ = ["Decoder", "Product"]


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """A layer as the forward pass uses it: products prepared by the kernels, and what a family may lack as None."""

    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_output: Linear
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    post_mlp_norm: Tensor | None
    window: int | None


@dataclass(frozen=True, slots=True)
class Product:
    """A linear layer by itself, and the sizes of its rows."""

    linear: Linear
    num_inputs: int
    num_outputs: int


class Decoder:
    """Pre-norm transformer decoder with rotary positions, grouped-query attention and a gated MLP.

    What a family adds to that (biases, further norms, windows, soft caps) is there or not in ``weights`` and
    ``config``; the decoder asks for it, never for the family.

    Args:
        config: Its shape.
        weights: Its weights; the dtype of computation is that of the embedding. Their layers are taken out one by one,
            so that those which the kernels keep in another layout are never held twice.
        kernels: Compute the operations.
        max_model_len: Longest sequence, in tokens.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights, kernels: Kernels, *, max_model_len: int) -> None:
        self.config = config
        self._kernels = kernels
        self._dtype = weights.embedding.dtype
        self._embedding = weights.embedding
        self._layers = [_prepare(kernels, weights.layers.pop(0), window) for window in config.windows]
        self._stack = _prepare_stack(config, self._layers, kernels)
        self._norm = weights.norm
        # Logits of 16 to 32 are 0.125 apart in bfloat16: rounding them would make ties of what is none.
        self._head = kernels.prepare_linear(weights.head, dtype=torch.float32)
        self._rope_table = _rope_table(config, weights, max_model_len)

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """Compute the batch's tokens and store their KV.

        Returns:
            [num_logits, vocab_size] float32 logits of the rows in ``batch.logits_indices``.
        """
        config = self.config
        # The residual stream is float32 whatever the weights are: 60 additions in bfloat16 would be the largest error
        # of all (measured on SmolLM2: twice the deviation of the logits), and it is small beside the weights.
        # index_select and not [...], which would wake all threads for a few rows.
        hidden = self._embedding.index_select(0, batch.input_ids).float()  # [num_tokens, hidden_size]
        if config.embedding_scale != 1:
            hidden = hidden * config.embedding_scale
        if self._stack is None:
            hidden = self._run_layers(hidden, batch, kv_cache)
        else:
            tables = (batch.block_tables, batch.cu_seqlens_q, batch.seq_lens)
            self._stack(
                *(hidden, kv_cache.keys, kv_cache.values, batch.positions, self._rope_table, batch.slot_mapping),
                *tables,
            )
        sampled = hidden.index_select(0, batch.logits_indices)
        logits = self._head(self._kernels.add_rms_norm(sampled, None, self._norm, config.rms_norm_eps, self._dtype))
        return logits if config.final_soft_cap is None else soft_cap(logits, config.final_soft_cap)

    def _run_layers(self, hidden: Tensor, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """The layers, one operation after the other."""
        config, eps, kernels = self.config, self.config.rms_norm_eps, self._kernels
        added: Tensor | None = None
        for layer, key_cache, value_cache in zip(self._layers, kv_cache.keys, kv_cache.values, strict=True):
            normed = kernels.add_rms_norm(hidden, added, layer.input_norm, eps, self._dtype)
            added = self._attention(layer, normed, batch, key_cache, value_cache)
            if layer.post_attention_norm is not None:
                added = rms_norm(added, layer.post_attention_norm, eps)
            normed = kernels.add_rms_norm(hidden, added, layer.mlp_norm, eps, self._dtype)
            added = layer.down(kernels.gated_activation(layer.gate_up(normed), gelu=config.family.gelu))
            if layer.post_mlp_norm is not None:
                added = rms_norm(added, layer.post_mlp_norm, eps)
        assert added is not None
        return hidden + added

    def products(self) -> tuple[list[Product], Product]:
        """The linear layers in the order of the forward pass, and that which makes logits."""
        config, found = self.config, []
        hidden, intermediate = config.hidden_size, config.intermediate_size
        num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        for layer in self._layers:
            found.append(Product(layer.qkv, hidden, num_q + 2 * num_kv))
            found.append(Product(layer.attention_output, num_q, hidden))
            found.append(Product(layer.gate_up, hidden, 2 * intermediate))
            found.append(Product(layer.down, intermediate, hidden))
        return found, Product(self._head, hidden, config.vocab_size)

    def _attention(
        self, layer: _Layer, hidden: Tensor, batch: ForwardBatch, key_cache: Tensor, value_cache: Tensor
    ) -> Tensor:
        config = self.config
        qkv = layer.qkv(hidden)  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = (layer.query_norm, layer.key_norm)
            self._kernels.norm_heads(qkv, *norms, config.num_kv_heads, config.rms_norm_eps)
        self._kernels.rope_store(qkv, batch.positions, self._rope_table, key_cache, value_cache, batch.slot_mapping)
        attended = self._kernels.paged_attention(
            qkv,
            key_cache,
            value_cache,
            batch.block_tables,
            batch.cu_seqlens_q,
            batch.seq_lens,
            config.attention_scale,
            window=layer.window,
            soft_cap=config.attention_soft_cap,
        )
        return layer.attention_output(attended)


def _prepare(kernels: Kernels, weights: LayerWeights, window: int | None) -> _Layer:
    return _Layer(
        input_norm=weights.input_norm,
        qkv=kernels.prepare_linear(weights.qkv, weights.qkv_bias),
        query_norm=weights.query_norm,
        key_norm=weights.key_norm,
        attention_output=kernels.prepare_linear(weights.attention_output),
        post_attention_norm=weights.post_attention_norm,
        mlp_norm=weights.mlp_norm,
        gate_up=kernels.prepare_linear(weights.gate_up),
        down=kernels.prepare_linear(weights.down),
        post_mlp_norm=weights.post_mlp_norm,
        window=window,
    )


def _prepare_stack(config: ModelConfig, layers: List[_Layer], kernels: Kernels) -> LayerStack | None:
    """The layers as one operation, where the kernels offer that and no layer has more than the plain ones."""
    extras = (item for x in layers for item in (x.query_norm, x.key_norm, x.post_attention_norm, x.post_mlp_norm))
    if not isinstance(kernels, StackKernels) or any(item is not None for item in extras):
        return None
    stacked = [
        StackLayer(
            input_norm=layer.input_norm,
            qkv=layer.qkv,
            attention_output=layer.attention_output,
            mlp_norm=layer.mlp_norm,
            gate_up=layer.gate_up,
            down=layer.down,
            window=layer.window,
        )
        for layer in layers
    ]
    shape = StackShape(
        num_heads=config.num_heads,
        intermediate_size=config.intermediate_size,
        eps=config.rms_norm_eps,
        scale=config.attention_scale,
        soft_cap=config.attention_soft_cap,
        gelu=config.family.gelu,
    )
    return kernels.prepare_stack(stacked, shape)


def _rope_table(config: ModelConfig, weights: DecoderWeights, max_model_len: int) -> Tensor:
    """Cosines and sines, [max_model_len, head_dim] float32, with the model's scaling."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inv_freq = 1.0 / config.rope_theta**exponents / weights.rope_freqs
    if config.rope_scaling is None:
        return rope_table(inv_freq, max_model_len)
    inv_freq = config.rope_scaling.apply(inv_freq, max_model_len)
    return rope_table(inv_freq, max_model_len, amplitude=config.rope_scaling.amplitude)
