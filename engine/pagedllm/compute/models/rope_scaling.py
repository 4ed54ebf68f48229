"""How rotary frequencies are changed for contexts longer than those of the training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import ModelFileError
from ...files.gguf_metadata import GGUFFile
from .fields import Fields

__all__ = ["Llama3RopeScaling", "LongRopeScaling", "read_gguf_rope_scaling", "read_rope_parameters"]

_LONG_ROPE_TYPES = ("longrope", "su")  # su is what Phi-3 called it first
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


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

    def apply(self, inv_freq: Tensor, max_model_len: int) -> Tensor:  # noqa: ARG002  as LongRopeScaling's
        """Stretch long wavelengths, keep short ones, blend between (Llama 3 herd, arXiv 2407.21783).

        Args:
            inv_freq: [head_dim / 2] float32.
            max_model_len: Of no account here.
        """
        turns = self.original_max_position_embeddings * inv_freq / (2 * math.pi)  # over the original context
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = keep.clamp(0, 1)
        return inv_freq * keep + inv_freq / self.factor * (1 - keep)

    @property
    def amplitude(self) -> float:
        """Factor of the cosines and sines."""
        return 1.0


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753): each frequency has a divisor of its own, of two sets, and rotation also scales.

    Which set is in force is decided when the model is loaded: the long one if sequences may be longer than the
    original context (``max_model_len``). To switch in the middle of a sequence, as transformers does, would leave
    keys in the cache that were rotated otherwise than the query, and make the text depend on what was cached.

    Args:
        short_factors: Divisors within the original context, ``head_dim / 2`` of them.
        long_factors: Divisors beyond it.
        original_max_position_embeddings: Context length of the training before the extension, in tokens.
        amplitude: Factor of the cosines and sines, in either case.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position_embeddings: int
    amplitude: float

    def apply(self, inv_freq: Tensor, max_model_len: int) -> Tensor:
        """Divide the frequencies.

        Args:
            inv_freq: [head_dim / 2] float32.
            max_model_len: Longest sequence, in tokens.
        """
        is_long = max_model_len > self.original_max_position_embeddings
        return inv_freq / torch.tensor(self.long_factors if is_long else self.short_factors, dtype=torch.float32)


RopeScaling = Llama3RopeScaling | LongRopeScaling


def read_rope_parameters(config: Fields, head_dim: int) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before).

    Raises:
        UnsupportedModelError: A rule that we do not implement, by name.
        ModelFileError: A parameter is missing or makes no sense.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelFileError(f"{config.where}: rope parameters are {scaling!r}; an object is expected")
    fields = Fields(config.where, scaling)
    theta = (fields if "rope_theta" in scaling else config).number("rope_theta", 10_000.0)
    # Some architectures nest one set of parameters per kind of layer.
    nested = {key: () for key, value in scaling.items() if isinstance(value, dict)}
    fields.refuse_unless({"partial_rotary_factor": (1,), "short_mscale": (), "long_mscale": (), **nested})
    key = "rope_type" if fields.get("rope_type") is not None else "type"
    rope_type = fields.get(key, "default")
    if rope_type == "default":
        return theta, None
    if rope_type == "llama3":
        return theta, Llama3RopeScaling(
            factor=fields.number("factor"),
            low_freq_factor=fields.number("low_freq_factor"),
            high_freq_factor=fields.number("high_freq_factor"),
            original_max_position_embeddings=fields.integer("original_max_position_embeddings"),
        )
    if rope_type in _LONG_ROPE_TYPES:
        return theta, _long_rope(config, fields, head_dim)
    raise fields.unsupported(key, "default, llama3, longrope and su are")


def _long_rope(config: Fields, scaling: Fields, head_dim: int) -> LongRopeScaling:
    # Phi-3 has the original length beside the parameters instead of among them.
    source = config if config.get("original_max_position_embeddings") is not None else scaling
    original = source.integer("original_max_position_embeddings")
    growth = scaling.number("factor", config.integer("max_position_embeddings") / original)
    return LongRopeScaling(
        short_factors=_factors(scaling, "short_factor", scaling.get("short_factor"), head_dim),
        long_factors=_factors(scaling, "long_factor", scaling.get("long_factor"), head_dim),
        original_max_position_embeddings=original,
        amplitude=scaling.number("attention_factor", _long_amplitude(growth, original)),
    )


def _long_amplitude(growth: float, original: int) -> float:
    # A length of 1 has no logarithm to divide by, and no model either.
    return 1.0 if growth <= 1 else math.sqrt(1 + math.log(growth) / math.log(max(original, 2)))


def _factors(fields: Fields, key: str, values: Any, head_dim: int) -> tuple[float, ...]:
    is_right = isinstance(values, list) and len(values) == head_dim // 2
    if not is_right or not all(type(x) in (int, float) and math.isfinite(x) and x > 0 for x in values):
        raise fields.wrong(key, values, f"a list of {head_dim // 2} positive numbers")
    return tuple(float(x) for x in values)


def read_gguf_rope_scaling(fields: Fields, gguf: GGUFFile, head_dim: int) -> LongRopeScaling | None:
    """LongRoPE where the file has its two small tensors of factors; None where it does not.

    Raises:
        UnsupportedModelError: LongRoPE is said to be in force, but there are no factors.
        ModelFileError: Factors that make no sense.
    """
    found = [name for name in (_SHORT_FACTORS, _LONG_FACTORS) if name in gguf.tensors]
    if not found:
        fields.refuse_unless({"rope.scaling.type": ("none",)})
        return None
    if len(found) == 1:
        raise ModelFileError(f"{gguf.path}: of the two sets of rope factors there is only {found[0]}")
    original = fields.integer("rope.scaling.original_context_length")
    growth = fields.integer("context_length") / original
    short, long = (
        _factors(fields, name, _read_floats(gguf, name), head_dim) for name in (_SHORT_FACTORS, _LONG_FACTORS)
    )
    return LongRopeScaling(
        short_factors=short,
        long_factors=long,
        original_max_position_embeddings=original,
        amplitude=fields.number("rope.scaling.attn_factor", _long_amplitude(growth, original)),
    )


def _read_floats(gguf: GGUFFile, name: str) -> list[float] | None:
    """The numbers of a small float32 tensor; None if it is none."""
    info = gguf.tensors[name]
    if info.type.name != "F32" or info.nbytes > 2**16:
        return None
    return [float(x) for x in np.fromfile(gguf.path, "<f4", count=info.nbytes // 4, offset=info.offset)]
