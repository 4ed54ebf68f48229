"""The shape of a model, read from config.json or GGUF metadata, before any weight is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ModelFileError, UnsupportedModelError
from ...files.gguf_metadata import GGUFFile, read_gguf
from ...files.json_file import read_json_object
from ...files.locate import ModelFiles

__all__ = ["SUPPORTED_ARCHITECTURES", "Llama3RopeScaling", "ModelConfig", "load_model_config"]

SUPPORTED_ARCHITECTURES = ("llama",)

# Fields of config.json that change the computation in ways the decoder does not implement, with the values (besides
# a missing field and null) that leave it as it is.
_REFUSED_UNLESS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "quantization_config": (),
    "sliding_window": (),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1,),
    "num_local_experts": (0, 1),
}
_GGUF_REFUSED_UNLESS: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attention.sliding_window": (0,),
    "attention.clamp_kqv": (0,),
    "attention.scale": (0,),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "logit_scale": (0, 1),
    "rope.scaling.type": ("none",),
}


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3.1's rule for longer contexts: low frequencies are divided by ``factor``, high ones stay, those between
    are blended.

    Args:
        factor: Divisor of the low frequencies.
        low_freq_factor: Wavelengths above ``original_max_position_embeddings / low_freq_factor`` are divided.
        high_freq_factor: Wavelengths below ``original_max_position_embeddings / high_freq_factor`` stay.
        original_max_position_embeddings: Context length of the training before the extension, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


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
        has_rope_freqs: The weights include ``"rope_freqs"``, float32 ``[head_dim / 2]``, and the decoder must use
            ``inv_freq / rope_freqs``. GGUF files store rope scaling like this; ``rope_scaling`` is then None.
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
    rope_scaling: Llama3RopeScaling | None
    tie_word_embeddings: bool
    max_position_embeddings: int
    has_rope_freqs: bool = False


def load_model_config(files: ModelFiles) -> ModelConfig:
    """Read a model's shape; no weight is read.

    Raises:
        UnsupportedModelError: An architecture or a field that we do not implement, by name.
        ModelFileError: A field is missing or makes no sense.
    """
    config = _from_gguf(read_gguf(files.path)) if files.kind == "gguf" else _from_folder(files)
    if config.num_heads % config.num_kv_heads:
        raise ModelFileError(
            f"{files.path}: {config.num_heads} attention heads are not a multiple of {config.num_kv_heads} KV heads"
        )
    if config.head_dim % 2:
        raise ModelFileError(f"{files.path}: head_dim is {config.head_dim}; rotary embeddings need an even one")
    return config


class _Fields:
    """Typed access to a mapping, with errors that name its source and the field."""

    def __init__(self, where: str, values: Mapping[str, Any], prefix: str = "") -> None:
        self.where = where
        self._values = values
        self._prefix = prefix

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(self._prefix + key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int or not 0 < value < 2**31:
            raise self._wrong(key, value, "a positive whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self._wrong(key, value, "a positive number")
        return float(value)

    def refuse_unless(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        for key, values in allowed.items():
            value = self.get(key)
            if value is not None and value not in values:
                raise UnsupportedModelError(f"{self.where}: {self._prefix}{key}={value!r} is not supported")

    def _wrong(self, key: str, value: Any, expected: str) -> ModelFileError:
        found = "missing" if value is None else repr(value)
        return ModelFileError(f"{self.where}: {self._prefix}{key} is {found}; {expected} is expected")


def _from_folder(files: ModelFiles) -> ModelConfig:
    path = files.path / "config.json"
    values = read_json_object(path)
    fields = _Fields(str(path), values)
    architecture = fields.get("model_type", "")
    _check_architecture(str(path), architecture)
    classes = fields.get("architectures", ["LlamaForCausalLM"])
    if "LlamaForCausalLM" not in classes:
        raise UnsupportedModelError(f"{path}: architectures={classes!r} is not supported; LlamaForCausalLM is")
    fields.refuse_unless(_REFUSED_UNLESS)
    if set(fields.get("layer_types", ())) - {"full_attention"}:
        raise UnsupportedModelError(f"{path}: layer_types={values['layer_types']!r} is not supported")
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    rope_theta, rope_scaling = _rope(str(path), values)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
    )


def _rope(where: str, values: Mapping[str, Any]) -> tuple[float, Llama3RopeScaling | None]:
    """Theta and scaling, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    parameters = values.get("rope_parameters") or {}
    scaling = parameters or values.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelFileError(f"{where}: rope parameters are {scaling!r}; an object is expected")
    theta_source = scaling if "rope_theta" in scaling else values
    theta = _Fields(where, theta_source).number("rope_theta", 10_000.0)
    fields = _Fields(where, scaling)
    fields.refuse_unless({"partial_rotary_factor": (1,)})
    rope_type = fields.get("rope_type", fields.get("type", "default"))
    if rope_type == "default":
        return theta, None
    if rope_type != "llama3":
        raise UnsupportedModelError(f"{where}: rope_type={rope_type!r} is not supported; default and llama3 are")
    return theta, Llama3RopeScaling(
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_max_position_embeddings=fields.integer("original_max_position_embeddings"),
    )


def _from_gguf(gguf: GGUFFile) -> ModelConfig:
    where, metadata = str(gguf.path), gguf.metadata
    _check_architecture(where, gguf.architecture)
    if metadata.get("split.count", 0) not in (0, 1):
        raise UnsupportedModelError(f"{where}: one part of a split GGUF file; merge it with llama.cpp's gguf-split")
    fields = _Fields(where, metadata, prefix=f"{gguf.architecture}.")
    fields.refuse_unless(_GGUF_REFUSED_UNLESS)
    hidden_size, num_heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    fields.refuse_unless({"attention.value_length": (head_dim,), "rope.dimension_count": (head_dim,)})
    return ModelConfig(
        architecture=gguf.architecture,
        vocab_size=fields.integer("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10_000.0),
        rope_scaling=None,
        tie_word_embeddings="output.weight" not in gguf.tensors,
        max_position_embeddings=fields.integer("context_length"),
        has_rope_freqs="rope_freqs.weight" in gguf.tensors,
    )


def _check_architecture(where: str, architecture: Any) -> None:
    if architecture not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise UnsupportedModelError(f"{where}: architecture {architecture!r} is not supported; supported: {supported}")
