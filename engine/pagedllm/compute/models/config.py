"""The shape of a model, read from config.json or GGUF metadata, before any weight is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ModelFileError, UnsupportedModelError
from ...files.gguf_metadata import GGUFFile, read_gguf
from ...files.json_file import read_json_object
from ...files.locate import ModelFiles
from .fields import Fields
from .registry import FAMILIES, Family, WindowPattern, family_of_gguf
from .rope_scaling import Llama3RopeScaling, LongRopeScaling, read_gguf_rope_scaling, read_rope_parameters

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "Llama3RopeScaling",
    "LongRopeScaling",
    "ModelConfig",
    "load_config_file",
    "load_model_config",
]

SUPPORTED_ARCHITECTURES = tuple(FAMILIES)

# The deepest published decoders have some 130 layers; a damaged count must not become a list of a billion entries.
_MAX_LAYERS = 1024

# Fields of config.json that change the computation in ways the decoder does not implement, with the values (besides
# a missing field and null) that leave it as it is.
_REFUSED_UNLESS: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_multiplier": (),
    "clip_qkv": (),
    "dual_chunk_attention_config": (),
    "embedding_multiplier": (1,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_bias": (False,),
    "num_experts": (0,),
    "num_local_experts": (0, 1),
    "partial_rotary_factor": (1,),
    "qk_layernorm": (False,),
    "quantization_config": (),
    "residual_multiplier": (1,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
}
_GGUF_REFUSED_UNLESS: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "use_parallel_residual": (False,),
}


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only model.

    Args:
        architecture: One of ``SUPPORTED_ARCHITECTURES``.
        vocab_size: Rows of the embedding; may exceed the tokenizer's ids (padding).
        head_dim: Of queries, keys and values alike; even.
        rope_theta: Base of the rotary frequencies: ``inv_freq[i] = rope_theta ** (-2 * i / head_dim)``, for ``i`` in
            ``[0, head_dim / 2)``; the first half of a head rotates with the second (the Hugging Face layout).
        rope_scaling: How ``inv_freq`` is changed for longer contexts; None: not at all.
        tie_word_embeddings: Whether the embedding serves as output projection too.
        max_position_embeddings: Longest sequence that the model was made for, in tokens.
        attention_scale: Of the attention scores, before they are capped.
        windows: Per layer, how many of the newest tokens a token sees, itself included; None: all.
        has_rope_freqs: The weights include ``"rope_freqs"``, float32 ``[head_dim / 2]``, and the decoder must use
            ``inv_freq / rope_freqs``. GGUF files store Llama 3's rope scaling like this; ``rope_scaling`` is then None.
        attention_soft_cap: Attention scores ``s`` become ``cap * tanh(s / cap)``; None: no cap.
        final_soft_cap: Likewise the logits.
        embedding_scale: Embeddings are multiplied by it.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | LongRopeScaling | None
    tie_word_embeddings: bool
    max_position_embeddings: int
    attention_scale: float
    windows: tuple[int | None, ...]
    has_rope_freqs: bool = False
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    embedding_scale: float = 1.0

    @property
    def family(self) -> Family:
        """What all models of the architecture have in common."""
        return FAMILIES[self.architecture]


def load_model_config(files: ModelFiles) -> ModelConfig:
    """Read a model's shape; no weight is read.

    Raises:
        UnsupportedModelError: An architecture or a field that we do not implement, by name.
        ModelFileError: A field is missing or makes no sense.
    """
    if files.kind == "gguf":
        return _checked(files.path, _from_gguf(read_gguf(files.path)))
    return load_config_file(files.path / "config.json")


def load_config_file(path: Path) -> ModelConfig:
    """Read a model's shape from its config.json alone.

    Raises:
        UnsupportedModelError: As ``load_model_config``.
        ModelFileError: Likewise; or there is no such file, or it is not JSON.
    """
    return _checked(path, _from_json(path))


def _checked(path: Path, config: ModelConfig) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise ModelFileError(
            f"{path}: {config.num_heads} attention heads are not a multiple of {config.num_kv_heads} KV heads"
        )
    if config.head_dim % 2:
        raise ModelFileError(f"{path}: head_dim is {config.head_dim}; rotary embeddings need an even one")
    return config


def _from_json(path: Path) -> ModelConfig:
    values = read_json_object(path)
    fields = Fields(str(path), values)
    family = FAMILIES.get(architecture) if isinstance(architecture := fields.get("model_type", ""), str) else None
    if family is None:
        raise _unsupported(str(path), architecture)
    classes = fields.get("architectures", [family.class_name])
    if family.class_name not in classes:
        raise UnsupportedModelError(f"{path}: architectures={classes!r} is not supported; {family.class_name} is")
    _refuse(fields, family)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers", limit=_MAX_LAYERS)
    head_dim = fields.integer("head_dim", family.head_dim or hidden_size // num_heads)
    rope_theta, rope_scaling = read_rope_parameters(fields, head_dim)
    query_scalar = fields.number("query_pre_attn_scalar", 256.0) if family.has_query_scalar else head_dim
    return ModelConfig(
        architecture=family.model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", family.tie_word_embeddings)),
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        attention_scale=query_scalar**-0.5,
        windows=_windows(fields, family, num_layers),
        attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping", family.attention_soft_cap),
        final_soft_cap=_soft_cap(fields, "final_logit_softcapping", family.final_soft_cap),
        embedding_scale=math.sqrt(hidden_size) if family.scales_embedding else 1.0,
    )


def _refuse(fields: Fields, family: Family) -> None:
    """Refuse what would change the computation and is not implemented for the family."""
    activations = ("hidden_act", "hidden_activation")
    fields.refuse_unless(_REFUSED_UNLESS | dict.fromkeys(activations, family.activations))
    if family.attention_soft_cap is None:
        fields.refuse_unless({"attn_logit_softcapping": (), "final_logit_softcapping": ()})
    if not family.has_query_scalar:
        fields.refuse_unless({"query_pre_attn_scalar": ()})
    if family.windows == "none":
        fields.refuse_unless({"sliding_window": ()})
    if family.windows != "late":
        # Where it is no switch it would be a field that we ignore.
        fields.refuse_unless({"use_sliding_window": (False,)})


def _windows(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window, by ``layer_types`` or by the family's pattern."""
    window = fields.integer("sliding_window", family.sliding_window) if _has_window(fields, family) else None
    first = fields.integer("max_window_layers", 28, least=0) if family.windows == "late" else 0
    windows = _by_pattern(family.windows, window, num_layers, first)
    types = fields.get("layer_types")
    if types is None:
        return windows
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != num_layers or not all(kind in known for kind in types):
        raise fields.unsupported("layer_types")
    listed = tuple(known[kind] for kind in types)
    is_free = family.windows in ("even", "late")
    if ("sliding_attention" in types and window is None) or (listed != windows and not is_free):
        raise fields.unsupported("layer_types")
    return listed


def _has_window(fields: Fields, family: Family) -> bool:
    if family.windows == "none" or fields.is_null("sliding_window"):
        return False
    if family.windows == "late":
        return bool(fields.get("use_sliding_window", False))
    return fields.get("sliding_window", family.sliding_window) is not None


def _by_pattern(pattern: WindowPattern, window: int | None, num_layers: int, first: int) -> tuple[int | None, ...]:
    layers = {
        "none": range(0),
        "all": range(num_layers),
        "even": range(0, num_layers, 2),
        "late": range(first, num_layers),
    }
    return tuple(window if layer in layers[pattern] else None for layer in range(num_layers))


def _soft_cap(fields: Fields, key: str, default: float | None) -> float | None:
    """A soft cap; the family's own where the field is missing, none where it is null."""
    if default is None or fields.is_null(key):
        return None
    return fields.number(key, default)


def _from_gguf(gguf: GGUFFile) -> ModelConfig:
    where, metadata = str(gguf.path), gguf.metadata
    family = family_of_gguf(gguf.architecture)
    if family is None:
        raise _unsupported(where, gguf.architecture, "; mistral is stored as llama")
    if metadata.get("split.count", 0) not in (0, 1):
        raise UnsupportedModelError(f"{where}: one part of a split GGUF file; merge it with llama.cpp's gguf-split")
    fields = Fields(where, metadata, prefix=f"{gguf.architecture}.")
    hidden_size, num_heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    num_layers = fields.integer("block_count", limit=_MAX_LAYERS)
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    _refuse_gguf(fields, family, head_dim)
    return ModelConfig(
        architecture=family.model_type,
        vocab_size=fields.integer("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10_000.0),
        rope_scaling=read_gguf_rope_scaling(fields, gguf, head_dim),
        tie_word_embeddings="output.weight" not in gguf.tensors,
        max_position_embeddings=fields.integer("context_length"),
        attention_scale=_gguf_attention_scale(fields, family, hidden_size / num_heads, head_dim, num_layers),
        windows=_by_pattern(family.gguf_windows, _gguf_window(fields, family), num_layers, 0),
        has_rope_freqs="rope_freqs.weight" in gguf.tensors,
        attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping", family.attention_soft_cap),
        final_soft_cap=_soft_cap(fields, "final_logit_softcapping", family.final_soft_cap),
        embedding_scale=math.sqrt(hidden_size) if family.scales_embedding else 1.0,
    )


def _refuse_gguf(fields: Fields, family: Family, head_dim: int) -> None:
    rope_types = ("none", "longrope") if family.gguf_extra else ("none",)
    same: dict[str, tuple[Any, ...]] = {
        "attention.value_length": (head_dim,),
        "rope.dimension_count": (head_dim,),
        "rope.scaling.type": rope_types,
        "attention.sliding_window_pattern": (2,) if family.gguf_windows == "even" else (),
    }
    fields.refuse_unless(_GGUF_REFUSED_UNLESS | same)
    if family.gguf_windows == "none":
        fields.refuse_unless({"attention.sliding_window": (0,)})
    if family.attention_soft_cap is None:
        fields.refuse_unless({"attn_logit_softcapping": (0,), "final_logit_softcapping": (0,)})


def _gguf_window(fields: Fields, family: Family) -> int | None:
    value = fields.get("attention.sliding_window", family.sliding_window)
    return fields.integer("attention.sliding_window", family.sliding_window) if value else None


def _gguf_attention_scale(
    fields: Fields, family: Family, hidden_per_head: float, head_dim: int, num_layers: int
) -> float:
    """Scale of the attention scores, which llama.cpp's converter does not store.

    Gemma 2 with 27 billion parameters is the one published model whose scalar is not its head_dim; like llama.cpp we
    know it by its 46 layers.
    """
    if fields.get("attention.scale", 0) != 0:
        return fields.number("attention.scale")
    is_gemma2_27b = family.has_query_scalar and num_layers == 46
    return float((hidden_per_head if is_gemma2_27b else head_dim) ** -0.5)


def _unsupported(where: str, architecture: Any, note: str = "") -> UnsupportedModelError:
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    return UnsupportedModelError(
        f"{where}: architecture {architecture!r} is not supported; supported: {supported}{note}"
    )
