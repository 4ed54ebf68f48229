"""Headers of the safetensors files in a model folder.

Layout: ``header_bytes: u64 (little-endian)``, a JSON object of ``name: {dtype, shape, data_offsets: [begin, end]}``,
then the data, from which offsets count. Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelFileError, UnsupportedModelError
from .json_file import parse_json_object, read_json_object

__all__ = ["INDEX_NAME", "SINGLE_NAME", "SafetensorsInfo", "find_shards", "read_safetensors", "read_weight_map"]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# The format's own limit on the header.
_MAX_HEADER_BYTES = 100_000_000
_ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True)
class SafetensorsInfo:
    """Where a tensor lies and what it holds.

    Args:
        name: Its name in the file.
        file: The shard that holds it.
        dtype: The format's name of its type, such as ``"BF16"``.
        shape: As in torch.
        nbytes: Bytes it takes.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def find_shards(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder: those its index names, else ``model.safetensors``, else the only one.

    Raises:
        ModelFileError: None, several without an index, or a shard that the index names is missing.
        UnsupportedModelError: Weights only as pickle, which can run code and is never loaded.
    """
    if (folder / INDEX_NAME).exists():
        shards = sorted(set(read_weight_map(folder).values()))
        for shard in shards:
            if not (folder / shard).is_file():
                raise ModelFileError(
                    f"{folder / shard}: missing; {INDEX_NAME} names it: the download may be incomplete"
                )
        return tuple(folder / shard for shard in shards)
    if (folder / SINGLE_NAME).is_file():
        return (folder / SINGLE_NAME,)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return (found[0],)
    if found:
        names = ", ".join(path.name for path in found)
        raise ModelFileError(f"{folder}: several safetensors files and no {INDEX_NAME} to say which belong: {names}")
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise UnsupportedModelError(
            f"{folder}: weights only as pickle ({pickles[0]}), which can run code when loaded. Convert them to "
            "safetensors, for example with AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    raise ModelFileError(f"{folder}: no weights; {SINGLE_NAME}, or {INDEX_NAME} with its shards, is expected")


def read_safetensors(folder: Path) -> dict[str, SafetensorsInfo]:
    """Read the headers of all shards of a folder; no tensor data is touched.

    Raises:
        ModelFileError: A shard is missing, damaged or cut short, or disagrees with the index.
        UnsupportedModelError: A tensor type that we do not know.
    """
    tensors: dict[str, SafetensorsInfo] = {}
    for shard in find_shards(folder):
        for info in _read_header(shard):
            if info.name in tensors:
                first = tensors[info.name].file.name
                raise ModelFileError(f"{folder}: tensor {info.name!r} is both in {first} and in {shard.name}")
            tensors[info.name] = info
    if (folder / INDEX_NAME).exists():
        for name, shard_name in read_weight_map(folder).items():
            if name not in tensors or tensors[name].file.name != shard_name:
                raise ModelFileError(f"{folder / shard_name}: tensor {name!r} is missing; {INDEX_NAME} says it is here")
    return tensors


def read_weight_map(folder: Path) -> dict[str, str]:
    """A folder's index: tensor name to shard file name, each one plainly inside ``folder``.

    Raises:
        ModelFileError: Missing or damaged, or a name that leads elsewhere.
    """
    path = folder / INDEX_NAME
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{path}: no weight_map")
    for name, shard in weight_map.items():
        # An index comes from outside: it must not lead out of its folder.
        if not isinstance(shard, str) or shard in ("", ".", "..") or "/" in shard or "\\" in shard or "\0" in shard:
            raise ModelFileError(f"{path}: tensor {name!r} is said to be in {shard!r}; a plain file name is expected")
    return weight_map


def _read_header(path: Path) -> Iterable[SafetensorsInfo]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= header_bytes <= min(size - 8, _MAX_HEADER_BYTES):
                raise ModelFileError(f"{path}: a header of {header_bytes} bytes in a file of {size} bytes")
            raw = file.read(header_bytes)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    header = parse_json_object(raw, where=f"{path} (header)")
    header.pop("__metadata__", None)
    return [_check_entry(path, name, entry, size - 8 - header_bytes) for name, entry in header.items()]


def _check_entry(path: Path, name: str, entry: Any, data_bytes: int) -> SafetensorsInfo:
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ModelFileError(f"{path}: the header's entry of tensor {name!r} is damaged")
    if dtype not in _ITEM_BYTES:
        raise UnsupportedModelError(f"{path}: tensor {name!r} has the unknown type {dtype!r}")
    begin, end = offsets
    expected = math.prod(shape) * _ITEM_BYTES[dtype]
    if end - begin != expected:
        raise ModelFileError(
            f"{path}: tensor {name!r} of type {dtype} and shape {shape} takes {expected} bytes, found {end - begin}"
        )
    if end > data_bytes:
        raise ModelFileError(
            f"{path}: tensor {name!r} ends at data byte {end}, but the file has {data_bytes} data bytes: "
            "the download may be incomplete"
        )
    return SafetensorsInfo(name, path, dtype, tuple(shape), expected)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
