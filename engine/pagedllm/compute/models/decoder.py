"""The decoder of the Llama family, over packed tokens and a paged KV cache."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import linear

from pagedllm_kernels.activation import silu_mul
from pagedllm_kernels.kv_store import kv_store
from pagedllm_kernels.paged_attention import paged_attention
from pagedllm_kernels.rms_norm import rms_norm
from pagedllm_kernels.rope import apply_rope, rope_table

from ..forward_batch import ForwardBatch
from ..kv_cache import KVCache
from .config import Llama3RopeScaling, ModelConfig
from .layers import DecoderWeights, LayerWeights

__all__ = ["Decoder"]


class Decoder:
    """Pre-norm transformer decoder with rotary positions, grouped-query attention and a gated MLP.

    Args:
        config: Its shape.
        weights: Its weights; the dtype of computation is theirs.
        max_model_len: Longest sequence, in tokens.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights, *, max_model_len: int) -> None:
        self.config = config
        self.weights = weights
        self._rope_table = rope_table(_inverse_frequencies(config) / weights.rope_freqs, max_model_len)
        self._scale = config.head_dim**-0.5

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """Compute the batch's tokens and store their KV.

        Returns:
            [num_sampled, vocab_size] float32 logits of the rows in ``batch.logits_indices``.
        """
        eps = self.config.rms_norm_eps
        # The residual stream is float32 whatever the weights are: 60 additions in bfloat16 would be the largest error
        # of all (measured on SmolLM2: twice the deviation of the logits), and it is small beside the weights.
        hidden = self.weights.embedding[batch.input_ids].float()  # [num_tokens, hidden_size]
        for layer, key_cache, value_cache in zip(self.weights.layers, kv_cache.keys, kv_cache.values, strict=True):
            normed = rms_norm(hidden, layer.input_norm, eps)
            hidden = hidden + self._attention(layer, normed, batch, key_cache, value_cache)
            normed = rms_norm(hidden, layer.mlp_norm, eps)
            hidden = hidden + linear(silu_mul(linear(normed, layer.gate_up)), layer.down)
        sampled = rms_norm(hidden[batch.logits_indices], self.weights.norm, eps)
        return linear(sampled, self.weights.head).float()

    def _attention(
        self, layer: LayerWeights, hidden: Tensor, batch: ForwardBatch, key_cache: Tensor, value_cache: Tensor
    ) -> Tensor:
        config = self.config
        qkv = linear(hidden, layer.qkv).unflatten(-1, (-1, config.head_dim))  # [num_tokens, heads, head_dim]
        query, key, value = qkv.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        query = apply_rope(query, batch.positions, self._rope_table)
        key = apply_rope(key, batch.positions, self._rope_table)
        kv_store(key, value, key_cache, value_cache, batch.slot_mapping)
        attended = paged_attention(
            query, key_cache, value_cache, batch.block_tables, batch.cu_seqlens_q, batch.seq_lens, self._scale
        )
        return linear(attended.flatten(1), layer.attention_output)


def _inverse_frequencies(config: ModelConfig) -> Tensor:
    """Rotary frequencies, [head_dim / 2] float32, with Llama 3's scaling where the model has it."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inv_freq = 1.0 / config.rope_theta**exponents
    return inv_freq if config.rope_scaling is None else _scale_like_llama3(inv_freq, config.rope_scaling)


def _scale_like_llama3(inv_freq: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Stretch long wavelengths by ``factor``, keep short ones, blend between (Llama 3 herd, arXiv 2407.21783)."""
    turns = scaling.original_max_position_embeddings * inv_freq / (2 * math.pi)  # over the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return inv_freq * keep + inv_freq / scaling.factor * (1 - keep)
