"""Weights of a model, streamed one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...files.locate import ModelFiles
from ..models.config import ModelConfig
from .safetensors import iter_safetensors_weights

__all__ = ["iter_weights"]


def iter_weights(files: ModelFiles, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream a model's weights under the Hugging Face names of its family, matrices as ``[out, in]``.

    ``lm_head.weight`` comes only with an untied model, ``rope_freqs`` only where ``config.has_rope_freqs``; norms come
    as factors, with Gemma's 1 added. Names, shapes and types are all checked in this call, before the first tensor is
    read. Pickle is never loaded.

    Args:
        files: Where the model is.
        config: Of the same model.

    Returns:
        An iterator of ``(name, tensor)``, each tensor once, in no particular order: float32 from a GGUF file, the
        stored type from safetensors. The caller owns each tensor, and only one is alive here at a time.

    Raises:
        UnsupportedModelError: A stored type that we do not read, naming the tensor.
        ModelFileError: Missing or unexpected tensors, wrong shapes, or a damaged file.
    """
    if files.kind == "gguf":
        from .gguf import iter_gguf_weights  # noqa: PLC0415 - the gguf package, which a folder does not need

        return iter_gguf_weights(files, config)
    return iter_safetensors_weights(files, config)
