"""The weights of one decoder layer and of what surrounds the layers, fused as the forward pass wants them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import ModelConfig
from .registry import MODEL_TENSORS, Family

__all__ = ["DecoderWeights", "LayerWeights", "allocate_weights", "tensor_shapes", "weight_slots"]


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Weights of one layer; linear ones are [out, in].

    Norms are float32 whatever the rest is: they are small, and Gemma's, stored as the difference from 1, would lose
    most of their digits in bfloat16 once the 1 is added.

    Attributes:
        input_norm: [hidden_size].
        qkv: [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]: queries, keys, values.
        qkv_bias: [(num_heads + 2 * num_kv_heads) * head_dim], or None.
        query_norm: [head_dim], of each head of the queries, or None.
        key_norm: Likewise of the keys.
        attention_output: [hidden_size, num_heads * head_dim].
        post_attention_norm: [hidden_size], of what attention adds to the residual stream, or None.
        mlp_norm: [hidden_size].
        gate_up: [2 * intermediate_size, hidden_size]: gate, up.
        down: [hidden_size, intermediate_size].
        post_mlp_norm: [hidden_size], of what the MLP adds to the residual stream, or None.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_output: Tensor
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    post_mlp_norm: Tensor | None


@dataclass(frozen=True, kw_only=True)
class DecoderWeights:
    """All weights of a decoder.

    Attributes:
        embedding: [vocab_size, hidden_size]; its dtype is that of the computation.
        layers: From the first to the last; the decoder takes them out one by one.
        norm: [hidden_size] float32, after the last layer.
        head: [vocab_size, hidden_size]; the embedding itself when they are tied.
        rope_freqs: [head_dim / 2] float32, divides the rotary frequencies; ones unless the file has its own.
    """

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor
    rope_freqs: Tensor


def allocate_weights(config: ModelConfig, dtype: torch.dtype) -> DecoderWeights:
    """Uninitialised weights of the right shapes."""
    embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype)
    return DecoderWeights(
        embedding=embedding,
        layers=[_allocate_layer(config, dtype) for _ in range(config.num_layers)],
        norm=torch.empty(config.hidden_size),
        head=embedding if config.tie_word_embeddings else torch.empty_like(embedding),
        rope_freqs=torch.ones(config.head_dim // 2),
    )


def _allocate_layer(config: ModelConfig, dtype: torch.dtype) -> LayerWeights:
    slots, shapes = config.family.slots, tensor_shapes(config)

    def norm(slot: str) -> Tensor | None:
        return torch.empty(shapes[slot]) if slot in slots else None

    def matrix(slot: str) -> Tensor:
        return torch.empty(shapes[slot], dtype=dtype)

    return LayerWeights(
        input_norm=torch.empty(config.hidden_size),
        qkv=matrix("qkv"),
        qkv_bias=torch.empty(shapes["qkv"][0], dtype=dtype) if "query_bias" in slots else None,
        query_norm=norm("query_norm"),
        key_norm=norm("key_norm"),
        attention_output=matrix("attention_output"),
        post_attention_norm=norm("post_attention_norm"),
        mlp_norm=torch.empty(config.hidden_size),
        gate_up=matrix("gate_up"),
        down=matrix("down"),
        post_mlp_norm=norm("post_mlp_norm"),
    )


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of what goes into each slot, whether the model's family has it or not; matrices are ``[out, in]``."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    norms = ("input_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm", "norm")
    return {
        **dict.fromkeys(norms, (hidden,)),
        **dict.fromkeys(("query_norm", "key_norm"), (config.head_dim,)),
        "embedding": (config.vocab_size, hidden),
        "head": (config.vocab_size, hidden),
        "rope_freqs": (config.head_dim // 2,),
        "qkv": (num_q + 2 * num_kv, hidden),
        "query": (num_q, hidden),
        "key": (num_kv, hidden),
        "value": (num_kv, hidden),
        "query_bias": (num_q,),
        "key_bias": (num_kv,),
        "value_bias": (num_kv,),
        "attention_output": (hidden, num_q),
        "gate_up": (2 * intermediate, hidden),
        "gate": (intermediate, hidden),
        "up": (intermediate, hidden),
        "down": (hidden, intermediate),
    }


def weight_slots(config: ModelConfig, weights: DecoderWeights) -> dict[str, Tensor]:
    """Where each tensor of a checkpoint goes, by its Hugging Face name: views into the fused weights."""
    slots = {
        names.hf: getattr(weights, names.slot)
        for names in MODEL_TENSORS
        if names.slot != "head" or not config.tie_word_embeddings
    }
    for i, layer in enumerate(weights.layers):
        parts = _layer_slots(config, layer, config.family)
        slots |= {f"model.layers.{i}.{names.hf}": parts[names.slot] for names in config.family.layer_tensors}
    return slots


def _layer_slots(config: ModelConfig, layer: LayerWeights, family: Family) -> dict[str, Tensor]:
    num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    query, key, value = layer.qkv.split([num_q, num_kv, num_kv])
    gate, up = layer.gate_up.chunk(2)
    slots = {"query": query, "key": key, "value": value, "gate": gate, "up": up}
    if layer.qkv_bias is not None:
        slots |= zip(
            ("query_bias", "key_bias", "value_bias"), layer.qkv_bias.split([num_q, num_kv, num_kv]), strict=True
        )
    return slots | {slot: getattr(layer, slot) for slot in family.slots - slots.keys()}
