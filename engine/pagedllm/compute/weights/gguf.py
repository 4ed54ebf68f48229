"""Weights of a GGUF file, dequantised to float32 one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from ...errors import ModelFileError, UnsupportedModelError
from ...files.gguf_metadata import GGUFFile, TensorInfo, read_gguf
from ...files.locate import ModelFiles
from ..models.config import ModelConfig
from .names import check_tensors, from_gguf_name

__all__ = ["iter_gguf_weights", "supported_types"]


def _is_dequantised(kind: GGMLQuantizationType) -> bool:
    """Whether the gguf package turns the type into floats; it has no list, but refuses others before it looks."""
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        return dequantize(np.zeros((1, block_bytes), np.uint8), kind).size == block_size
    except NotImplementedError:
        return False


def supported_types() -> tuple[str, ...]:
    """ggml's names of the tensor types that we read: all that the gguf package dequantises."""
    return tuple(kind.name for kind in GGML_QUANT_SIZES if _is_dequantised(kind))


def iter_gguf_weights(files: ModelFiles, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, float32 tensor)`` in the file's order. All checks come before the first tensor.

    Raises:
        UnsupportedModelError: A quantisation that we do not read, naming the tensor.
        ModelFileError: Missing or unexpected tensors, wrong shapes, or a damaged file.
    """
    gguf = read_gguf(files.path)
    tensors = _by_our_names(gguf, config)
    supported = supported_types()
    for info in tensors.values():
        if info.type.name not in supported:
            raise UnsupportedModelError(
                f"{files.path}: tensor {info.name!r} is stored as {info.type.name}; supported: {', '.join(supported)}"
            )
    return (
        (name, _read_tensor(gguf, info, num_permuted_heads=_num_permuted_heads(name, config)))
        for name, info in tensors.items()
    )


def _by_our_names(gguf: GGUFFile, config: ModelConfig) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    extra = []
    for info in gguf.tensors.values():
        name = from_gguf_name(info.name, config.family)
        if info.name in config.family.gguf_extra:
            continue
        if name is None:
            extra.append(info.name)
        elif name in tensors:
            raise ModelFileError(f"{gguf.path}: {info.name!r} and {tensors[name].name!r} are the same tensor")
        else:
            tensors[name] = info
    check_tensors(gguf.path, {name: info.shape for name, info in tensors.items()}, config, extra)
    return tensors


def _num_permuted_heads(name: str, config: ModelConfig) -> int:
    """How many heads of interleaved rows the tensor has, 0 for one without."""
    if not config.family.gguf_permutes_rope:
        return 0
    if name.endswith("q_proj.weight"):
        return config.num_heads
    return config.num_kv_heads if name.endswith("k_proj.weight") else 0


def _read_tensor(gguf: GGUFFile, info: TensorInfo, *, num_permuted_heads: int) -> torch.Tensor:
    try:
        raw = np.memmap(gguf.path, np.uint8, mode="r", offset=info.offset, shape=(info.nbytes,))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{gguf.path}: tensor {info.name!r} cannot be read: {error}") from error
    row_bytes = info.shape[-1] // info.type.block_size * info.type.block_bytes
    blocks = raw.reshape(*info.shape[:-1], row_bytes)
    if info.type.name == "F32":
        values = blocks.view("<f4").astype(np.float32)
    else:
        values = dequantize(blocks, GGMLQuantizationType(info.type.id))
    if num_permuted_heads:
        values = _unpermute(values, num_permuted_heads)
    # Contiguous and our own memory: torch refuses read-only arrays, and the map should not outlive this call.
    return torch.from_numpy(np.require(values, np.float32, ["C", "W", "O"])).reshape(info.shape)


def _unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of q and k.

    Its rotary embedding turns neighbouring rows (0, 1), (2, 3) …; Hugging Face's turns row i with row i + head_dim/2.
    The conversion to GGUF therefore interleaves the two halves of each head.

    Args:
        rows: ``[num_heads * head_dim, in]``, interleaved.

    Returns:
        The same shape, halves apart.
    """
    return rows.reshape(num_heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
