"""Weights of a folder with safetensors files, in their stored type."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from safetensors import SafetensorError, safe_open

from ...errors import ModelFileError, UnsupportedModelError
from ...files.locate import ModelFiles
from ...files.safetensors_metadata import SafetensorsInfo, read_safetensors
from ..models.config import ModelConfig
from .names import check_tensors, norm_names

__all__ = ["iter_safetensors_weights"]

_SUPPORTED_TYPES = ("F32", "F16", "BF16")
# Old checkpoints carry the rotary frequencies, which follow from the configuration.
_HARMLESS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def iter_safetensors_weights(files: ModelFiles, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, tensor)``, shard by shard. Names, shapes and types are checked before the first tensor.

    A family's ``norm_offset`` is added to norms, in float32.

    Raises:
        UnsupportedModelError: A type that is not a float of 16 or 32 bits, naming the tensor.
        ModelFileError: Missing or unexpected tensors, wrong shapes, or a damaged file.
    """
    tensors = {name: info for name, info in read_safetensors(files.path).items() if not _HARMLESS.fullmatch(name)}
    redundant_output = tensors.pop(_OUTPUT, None) if config.tie_word_embeddings else None
    check_tensors(files.path, {name: info.shape for name, info in tensors.items()}, config, extra=())
    for info in tensors.values():
        if info.dtype not in _SUPPORTED_TYPES:
            raise UnsupportedModelError(
                f"{info.file}: tensor {info.name!r} is stored as {info.dtype}; supported: {', '.join(_SUPPORTED_TYPES)}"
            )
    if redundant_output is not None:
        _check_tied(tensors[_EMBEDDING], redundant_output)
    if config.family.norm_offset == 0:
        return _read(tensors)
    norms, offset = norm_names(config), config.family.norm_offset
    return ((name, tensor.float() + offset if name in norms else tensor) for name, tensor in _read(tensors))


def _read(tensors: dict[str, SafetensorsInfo]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in dict.fromkeys(info.file for info in tensors.values()):
        try:
            with safe_open(str(file), framework="pt") as shard:
                for info in tensors.values():
                    if info.file == file:
                        yield info.name, shard.get_tensor(info.name)
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{file}: cannot be read: {error}") from error


def _check_tied(embedding: SafetensorsInfo, output: SafetensorsInfo) -> None:
    """A tied model may store the shared tensor twice; two different ones contradict its configuration."""
    values = [tensor for info in (embedding, output) for _, tensor in _read({info.name: info})]
    if not torch.equal(*values):
        raise ModelFileError(f"{output.file}: tie_word_embeddings is set, but {_OUTPUT} differs from {_EMBEDDING}")
