"""The weights of one decoder layer and of what surrounds the layers, fused as the forward pass wants them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import ModelConfig

__all__ = ["DecoderWeights", "LayerWeights", "allocate_weights", "weight_slots"]


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Weights of one layer; linear ones are [out, in].

    Attributes:
        input_norm: [hidden_size].
        qkv: [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]: queries, keys, values.
        attention_output: [hidden_size, num_heads * head_dim].
        mlp_norm: [hidden_size].
        gate_up: [2 * intermediate_size, hidden_size]: gate, up.
        down: [hidden_size, intermediate_size].
    """

    input_norm: Tensor
    qkv: Tensor
    attention_output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, kw_only=True)
class DecoderWeights:
    """All weights of a decoder.

    Attributes:
        embedding: [vocab_size, hidden_size].
        norm: [hidden_size], after the last layer.
        head: [vocab_size, hidden_size]; the embedding itself when they are tied.
        rope_freqs: [head_dim / 2] float32, divides the rotary frequencies; ones unless the file has its own.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    rope_freqs: Tensor


def allocate_weights(config: ModelConfig, dtype: torch.dtype) -> DecoderWeights:
    """Uninitialised weights of the right shapes."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    hidden, num_q, num_kv = (
        config.hidden_size,
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    embedding = empty(config.vocab_size, hidden)
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(
            LayerWeights(
                input_norm=empty(hidden),
                qkv=empty(num_q + 2 * num_kv, hidden),
                attention_output=empty(hidden, num_q),
                mlp_norm=empty(hidden),
                gate_up=empty(2 * config.intermediate_size, hidden),
                down=empty(hidden, config.intermediate_size),
            )
            for _ in range(config.num_layers)
        ),
        norm=empty(hidden),
        head=embedding if config.tie_word_embeddings else empty(config.vocab_size, hidden),
        rope_freqs=torch.ones(config.head_dim // 2),
    )


def weight_slots(config: ModelConfig, weights: DecoderWeights) -> dict[str, Tensor]:
    """Where each tensor of a checkpoint goes, by its Hugging Face name: views into the fused weights."""
    num_q, num_kv, num_mlp = (
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
        config.intermediate_size,
    )
    slots = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.norm,
        "rope_freqs": weights.rope_freqs,
    }
    if not config.tie_word_embeddings:
        slots["lm_head.weight"] = weights.head
    for i, layer in enumerate(weights.layers):
        prefix = f"model.layers.{i}."
        slots |= {
            prefix + "input_layernorm.weight": layer.input_norm,
            prefix + "self_attn.q_proj.weight": layer.qkv[:num_q],
            prefix + "self_attn.k_proj.weight": layer.qkv[num_q : num_q + num_kv],
            prefix + "self_attn.v_proj.weight": layer.qkv[num_q + num_kv :],
            prefix + "self_attn.o_proj.weight": layer.attention_output,
            prefix + "post_attention_layernorm.weight": layer.mlp_norm,
            prefix + "mlp.gate_proj.weight": layer.gate_up[:num_mlp],
            prefix + "mlp.up_proj.weight": layer.gate_up[num_mlp:],
            prefix + "mlp.down_proj.weight": layer.down,
        }
    return slots
