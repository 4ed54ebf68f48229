"""Tensor names and shapes: ours are those of Hugging Face checkpoints; GGUF's are translated to them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...errors import ModelFileError
from ..models.config import ModelConfig
from ..models.layers import tensor_shapes
from ..models.registry import MODEL_TENSORS, Family

__all__ = ["check_tensors", "expected_shapes", "from_gguf_name", "norm_names"]

_GGUF_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)")


def from_gguf_name(name: str, family: Family) -> str | None:
    """Our name of a GGUF tensor, or None for one that a model of the family does not have."""
    match = _GGUF_LAYER.fullmatch(name)
    table = MODEL_TENSORS if match is None else family.layer_tensors
    found = next((names.hf for names in table if names.gguf == (name if match is None else match[2])), None)
    return found if match is None or found is None else f"model.layers.{int(match[1])}.{found}"


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the model, by our name; matrices are ``[out, in]``."""
    by_slot = tensor_shapes(config)
    absent = {"head"} if config.tie_word_embeddings else set()
    absent |= set() if config.has_rope_freqs else {"rope_freqs"}
    shapes = {names.hf: by_slot[names.slot] for names in MODEL_TENSORS if names.slot not in absent}
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{names.hf}": by_slot[names.slot] for names in config.family.layer_tensors}
    return shapes


def norm_names(config: ModelConfig) -> frozenset[str]:
    """Our names of all norms."""
    parts = [names.hf for names in config.family.layer_tensors if names.slot.endswith("_norm")]
    layers = (f"model.layers.{layer}.{part}" for layer in range(config.num_layers) for part in parts)
    return frozenset({"model.norm.weight", *layers})


def check_tensors(path: Path, found: Mapping[str, tuple[int, ...]], config: ModelConfig, extra: Iterable[str]) -> None:
    """Check names and shapes of a model's tensors against its configuration.

    Args:
        path: Named in errors.
        found: Shapes by our names.
        config: What is expected.
        extra: Names in the file that mean nothing to us, as the file has them.

    Raises:
        ModelFileError: Naming missing or unexpected tensors, or one with its found and its expected shape.
    """
    if config.num_layers > len(found):
        # Said before a damaged count makes us list the tensors of a billion layers.
        raise ModelFileError(f"{path}: {len(found)} known tensors are too few for {config.num_layers} layers")
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelFileError(f"{path}: missing tensors: {_some(missing)}")
    unexpected = [*extra, *(name for name in found if name not in expected)]
    if unexpected:
        raise ModelFileError(f"{path}: tensors that a {config.architecture} model does not have: {_some(unexpected)}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelFileError(
                f"{path}: tensor {name} has shape {list(found[name])}; the configuration implies {list(shape)}"
            )


def _some(names: list[str], limit: int = 5) -> str:
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")
