"""The model families: what sets each apart, and what its tensors are called in either file format.

A family is data. All of them run on the one decoder, which finds their differences in ``ModelConfig`` and in the
weights that are there or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FAMILIES", "MODEL_TENSORS", "Family", "TensorNames", "WindowPattern", "family_of_gguf"]

WindowPattern = Literal["none", "all", "even", "late"]
"""Which layers see only a window: ``late`` are those from ``max_window_layers`` on, counted from 0 like ``even``."""


@dataclass(frozen=True)
class TensorNames:
    """One tensor under its three names.

    Args:
        slot: Ours: a field of ``LayerWeights`` or ``DecoderWeights``, or a part of a fused one.
        hf: In a Hugging Face checkpoint; of a layer's tensor what follows ``model.layers.<i>.``.
        gguf: In a GGUF file; of a layer's tensor what follows ``blk.<i>.``.
    """

    slot: str
    hf: str
    gguf: str


@dataclass(frozen=True, kw_only=True)
class Family:
    """What all models of an architecture have in common.

    Args:
        model_type: Its name in config.json, and ours.
        class_name: The transformers class that computes the same.
        gguf_architecture: Its name in GGUF files; None if another family's name stands for it there.
        layer_tensors: Of each layer.
        gguf_extra: Tensors of a GGUF file that are read with the configuration.
        activations: What config.json may call its activation.
        gelu: Whether the activation is GELU (by tanh) instead of SiLU.
        tie_word_embeddings: Default where config.json is silent.
        head_dim: Default where config.json is silent; None: hidden_size / num_attention_heads.
        norm_offset: Added to the weights of all norms in a Hugging Face checkpoint. GGUF files have it added.
        gguf_permutes_rope: Whether llama.cpp's converter interleaves the rows of q and k.
        windows: Layers with a sliding window according to config.json, unless ``layer_types`` lists them.
        gguf_windows: The same for a GGUF file.
        sliding_window: Default in tokens where the configuration is silent; None: no window.
        attention_soft_cap: Likewise of the attention scores; None also says that the family has none.
        final_soft_cap: Likewise of the logits.
        has_query_scalar: Whether config.json gives the scale of scores as ``query_pre_attn_scalar ** -0.5``.
        scales_embedding: Whether embeddings are multiplied by ``sqrt(hidden_size)``.
    """

    model_type: str
    class_name: str
    gguf_architecture: str | None
    layer_tensors: tuple[TensorNames, ...]
    gguf_extra: tuple[str, ...] = ()
    activations: tuple[str, ...] = ("silu", "swish")
    gelu: bool = False
    tie_word_embeddings: bool = False
    head_dim: int | None = None
    norm_offset: float = 0.0
    gguf_permutes_rope: bool = False
    windows: WindowPattern = "none"
    gguf_windows: WindowPattern = "none"
    sliding_window: int | None = None
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    has_query_scalar: bool = False
    scales_embedding: bool = False

    @property
    def slots(self) -> frozenset[str]:
        """Slots of a layer."""
        return frozenset(names.slot for names in self.layer_tensors)


MODEL_TENSORS = (
    TensorNames("embedding", "model.embed_tokens.weight", "token_embd.weight"),
    TensorNames("norm", "model.norm.weight", "output_norm.weight"),
    TensorNames("head", "lm_head.weight", "output.weight"),
    TensorNames("rope_freqs", "rope_freqs", "rope_freqs.weight"),
)
"""Tensors around the layers, under the same names in all families. A tied model lacks the head."""

_INPUT_NORM = TensorNames("input_norm", "input_layernorm.weight", "attn_norm.weight")
_MLP_NORM = TensorNames("mlp_norm", "post_attention_layernorm.weight", "ffn_norm.weight")
_ATTENTION = (
    TensorNames("query", "self_attn.q_proj.weight", "attn_q.weight"),
    TensorNames("key", "self_attn.k_proj.weight", "attn_k.weight"),
    TensorNames("value", "self_attn.v_proj.weight", "attn_v.weight"),
    TensorNames("attention_output", "self_attn.o_proj.weight", "attn_output.weight"),
)
_MLP = (
    TensorNames("gate", "mlp.gate_proj.weight", "ffn_gate.weight"),
    TensorNames("up", "mlp.up_proj.weight", "ffn_up.weight"),
    TensorNames("down", "mlp.down_proj.weight", "ffn_down.weight"),
)

_LLAMA_TENSORS = (_INPUT_NORM, *_ATTENTION, _MLP_NORM, *_MLP)
_QWEN2_TENSORS = (
    *_LLAMA_TENSORS,
    TensorNames("query_bias", "self_attn.q_proj.bias", "attn_q.bias"),
    TensorNames("key_bias", "self_attn.k_proj.bias", "attn_k.bias"),
    TensorNames("value_bias", "self_attn.v_proj.bias", "attn_v.bias"),
)
_QWEN3_TENSORS = (
    *_LLAMA_TENSORS,
    TensorNames("query_norm", "self_attn.q_norm.weight", "attn_q_norm.weight"),
    TensorNames("key_norm", "self_attn.k_norm.weight", "attn_k_norm.weight"),
)
_PHI3_TENSORS = (
    _INPUT_NORM,
    TensorNames("qkv", "self_attn.qkv_proj.weight", "attn_qkv.weight"),
    TensorNames("attention_output", "self_attn.o_proj.weight", "attn_output.weight"),
    _MLP_NORM,
    TensorNames("gate_up", "mlp.gate_up_proj.weight", "ffn_up.weight"),
    TensorNames("down", "mlp.down_proj.weight", "ffn_down.weight"),
)
# Gemma calls the norm after attention what Llama calls the norm before the MLP.
_GEMMA2_TENSORS = (
    _INPUT_NORM,
    *_ATTENTION,
    TensorNames("post_attention_norm", "post_attention_layernorm.weight", "post_attention_norm.weight"),
    TensorNames("mlp_norm", "pre_feedforward_layernorm.weight", "ffn_norm.weight"),
    *_MLP,
    TensorNames("post_mlp_norm", "post_feedforward_layernorm.weight", "post_ffw_norm.weight"),
)

_ALL = (
    Family(
        model_type="llama",
        class_name="LlamaForCausalLM",
        gguf_architecture="llama",
        layer_tensors=_LLAMA_TENSORS,
        gguf_permutes_rope=True,
        # Mistral models call themselves llama in GGUF.
        gguf_windows="all",
    ),
    Family(
        model_type="mistral",
        class_name="MistralForCausalLM",
        gguf_architecture=None,
        layer_tensors=_LLAMA_TENSORS,
        windows="all",
        sliding_window=4096,
    ),
    Family(
        model_type="qwen2",
        class_name="Qwen2ForCausalLM",
        gguf_architecture="qwen2",
        layer_tensors=_QWEN2_TENSORS,
        windows="late",
        sliding_window=4096,
    ),
    Family(
        model_type="qwen3",
        class_name="Qwen3ForCausalLM",
        gguf_architecture="qwen3",
        layer_tensors=_QWEN3_TENSORS,
        head_dim=128,
        windows="late",
        sliding_window=4096,
    ),
    Family(
        model_type="phi3",
        class_name="Phi3ForCausalLM",
        gguf_architecture="phi3",
        layer_tensors=_PHI3_TENSORS,
        gguf_extra=("rope_factors_short.weight", "rope_factors_long.weight"),
        windows="all",
        gguf_windows="all",
    ),
    Family(
        model_type="gemma2",
        class_name="Gemma2ForCausalLM",
        gguf_architecture="gemma2",
        layer_tensors=_GEMMA2_TENSORS,
        activations=("gelu_pytorch_tanh",),
        gelu=True,
        tie_word_embeddings=True,
        head_dim=256,
        norm_offset=1.0,
        windows="even",
        gguf_windows="even",
        sliding_window=4096,
        attention_soft_cap=50.0,
        final_soft_cap=30.0,
        has_query_scalar=True,
        scales_embedding=True,
    ),
)

FAMILIES: dict[str, Family] = {family.model_type: family for family in _ALL}
"""By the name in config.json."""


def family_of_gguf(architecture: str) -> Family | None:
    """The family that a GGUF file's architecture means, or None."""
    return next((family for family in _ALL if family.gguf_architecture == architecture), None)
