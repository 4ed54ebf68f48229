"""The one decoder of all families, over packed tokens and a paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from pagedllm_kernels.activation import gelu_tanh_mul, silu_mul, soft_cap
from pagedllm_kernels.kv_store import kv_store
from pagedllm_kernels.paged_attention import paged_attention
from pagedllm_kernels.rms_norm import rms_norm
from pagedllm_kernels.rope import apply_rope, rope_table

from ..forward_batch import ForwardBatch
from ..kv_cache import KVCache
from .config import ModelConfig
from .layers import DecoderWeights, LayerWeights

__all__ = ["Decoder"]


class Decoder:
    """Pre-norm transformer decoder with rotary positions, grouped-query attention and a gated MLP.

    What a family adds to that (biases, further norms, windows, soft caps) is there or not in ``weights`` and
    ``config``; the decoder asks for it, never for the family.

    Args:
        config: Its shape.
        weights: Its weights; the dtype of computation is that of the embedding.
        max_model_len: Longest sequence, in tokens.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights, *, max_model_len: int) -> None:
        self.config = config
        self.weights = weights
        self._dtype = weights.embedding.dtype
        self._gated_activation = gelu_tanh_mul if config.family.gelu else silu_mul
        self._rope_table = _rope_table(config, weights, max_model_len)

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """Compute the batch's tokens and store their KV.

        Returns:
            [num_sampled, vocab_size] float32 logits of the rows in ``batch.logits_indices``.
        """
        config, eps = self.config, self.config.rms_norm_eps
        # The residual stream is float32 whatever the weights are: 60 additions in bfloat16 would be the largest error
        # of all (measured on SmolLM2: twice the deviation of the logits), and it is small beside the weights.
        hidden = self.weights.embedding[batch.input_ids].float()  # [num_tokens, hidden_size]
        if config.embedding_scale != 1:
            hidden = hidden * config.embedding_scale
        caches = zip(kv_cache.keys, kv_cache.values, strict=True)
        for layer, window, (key_cache, value_cache) in zip(self.weights.layers, config.windows, caches, strict=True):
            normed = rms_norm(hidden, layer.input_norm, eps, dtype=self._dtype)
            added = self._attention(layer, normed, batch, key_cache, value_cache, window)
            if layer.post_attention_norm is not None:
                added = rms_norm(added, layer.post_attention_norm, eps)
            hidden = hidden + added
            normed = rms_norm(hidden, layer.mlp_norm, eps, dtype=self._dtype)
            added = linear(self._gated_activation(linear(normed, layer.gate_up)), layer.down)
            if layer.post_mlp_norm is not None:
                added = rms_norm(added, layer.post_mlp_norm, eps)
            hidden = hidden + added
        sampled = rms_norm(hidden[batch.logits_indices], self.weights.norm, eps, dtype=self._dtype)
        logits = linear(sampled, self.weights.head).float()
        return logits if config.final_soft_cap is None else soft_cap(logits, config.final_soft_cap)

    def _attention(
        self,
        layer: LayerWeights,
        hidden: Tensor,
        batch: ForwardBatch,
        key_cache: Tensor,
        value_cache: Tensor,
        window: int | None,
    ) -> Tensor:
        config = self.config
        # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
        qkv = linear(hidden, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, config.head_dim))
        query, key, value = qkv.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = rms_norm(query, layer.query_norm, config.rms_norm_eps, dtype=self._dtype)
            key = rms_norm(key, layer.key_norm, config.rms_norm_eps, dtype=self._dtype)
        query = apply_rope(query, batch.positions, self._rope_table)
        key = apply_rope(key, batch.positions, self._rope_table)
        kv_store(key, value, key_cache, value_cache, batch.slot_mapping)
        attended = paged_attention(
            query,
            key_cache,
            value_cache,
            batch.block_tables,
            batch.cu_seqlens_q,
            batch.seq_lens,
            config.attention_scale,
            window=window,
            soft_cap=config.attention_soft_cap,
        )
        return linear(attended.flatten(1), layer.attention_output)


def _rope_table(config: ModelConfig, weights: DecoderWeights, max_model_len: int) -> Tensor:
    """Cosines and sines, [max_model_len, head_dim] float32, with the model's scaling."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inv_freq = 1.0 / config.rope_theta**exponents / weights.rope_freqs
    if config.rope_scaling is None:
        return rope_table(inv_freq, max_model_len)
    inv_freq = config.rope_scaling.apply(inv_freq, max_model_len)
    return rope_table(inv_freq, max_model_len, amplitude=config.rope_scaling.amplitude)
