"""Metadata of a GGUF file, read over mmap with every count checked against the file's size first.

Layout (GGUF version 2 and 3, little-endian)::

    "GGUF"  version: u32  tensor_count: u64  kv_count: u64
    kv_count     × key: string  value_type: u32  value
    tensor_count × name: string  n_dims: u32  dims: u64[n_dims]  type: u32  offset: u64
    padding to the alignment, then tensor data; offsets count from here

    string = length: u64, UTF-8 bytes        array = item_type: u32, count: u64, items

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelFileError, UnsupportedModelError

__all__ = ["GGMLType", "GGUFFile", "TensorInfo", "read_gguf"]

_MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_MAX_ARRAY_DEPTH = 4

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]

# The fewest bytes that a key-value pair (empty key, one-byte value) and a tensor entry (no dimension) can take.
_MIN_KV_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8


@dataclass(frozen=True)
class GGMLType:
    """How a tensor's numbers are stored.

    Args:
        id: ggml's number of the type.
        name: ggml's name of it, such as ``"Q4_1"``.
        block_size: Numbers per block.
        block_bytes: Bytes per block.
    """

    id: int
    name: str
    block_size: int
    block_bytes: int


_TYPES = {
    type_id: GGMLType(type_id, name, block_size, block_bytes)
    for type_id, name, block_size, block_bytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 40),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
    )
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and what it holds.

    Args:
        name: Its name in the file.
        shape: In numpy's and torch's order, slowest dimension first (the file has it the other way round).
        type: How its numbers are stored; blocks run along the last dimension.
        offset: Of its first byte, from the start of the file.
        nbytes: Bytes it takes there.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file's metadata.

    Args:
        path: The file.
        metadata: Values by key. Arrays of strings are lists; arrays of numbers are 1-d numpy arrays.
        tensors: By name, in the file's order.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def architecture(self) -> str:
        """Such as ``"llama"``; empty if the file does not say."""
        value = self.metadata.get("general.architecture", "")
        return value if isinstance(value, str) else ""


def read_gguf(path: str | Path) -> GGUFFile:
    """Read metadata and tensor table; no tensor data is touched.

    Memory is bounded by a small multiple of the file's size, whatever the counts in it claim.

    Args:
        path: A GGUF file of version 2 or 3.

    Raises:
        ModelFileError: Not a GGUF file, damaged, or cut short; the message has the numbers.
        UnsupportedModelError: A version, byte order or tensor type that we do not read.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < len(_MAGIC) + 4 + 8 + 8:
                raise ModelFileError(f"{path}: {size} bytes is too short for a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
                return _Reader(path, buffer).read()
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from error


class _Reader:
    """A cursor over the file. ``position`` never passes ``size``; each ``_take`` checks before it moves."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self._path = path
        self._buffer = buffer
        self._size = len(buffer)
        self._position = 0

    def read(self) -> GGUFFile:
        self._check_magic_and_version()
        num_tensors = self._count(_MIN_TENSOR_BYTES, "tensors", also_ahead=8)
        num_pairs = self._count(_MIN_KV_BYTES, "metadata entries")
        metadata = self._read_metadata(num_pairs)
        tensors = self._read_tensors(num_tensors, metadata)
        return GGUFFile(self._path, metadata, tensors)

    def _check_magic_and_version(self) -> None:
        start = self._take(len(_MAGIC), "magic")
        magic = self._buffer[start : start + len(_MAGIC)]
        if magic != _MAGIC:
            raise self._damaged(f"not a GGUF file: starts with {magic!r} instead of {_MAGIC!r}")
        version = self._scalar(_U32, "version")
        if version in (2, 3):
            return
        if version & 0xFFFF == 0:
            raise UnsupportedModelError(f"{self._path}: a big-endian GGUF file; only little-endian ones are read")
        raise UnsupportedModelError(f"{self._path}: GGUF version {version}; versions 2 and 3 are read")

    def _read_metadata(self, num_pairs: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string("a metadata key")
            if key in metadata:
                raise self._damaged(f"metadata key {key!r} occurs twice")
            value_type = self._scalar(_U32, key)
            metadata[key] = self._value(value_type, key, depth=0)
        return metadata

    def _read_tensors(self, num_tensors: int, metadata: dict[str, Any]) -> dict[str, TensorInfo]:
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!r}; a power of two is expected")
        data_start = -(-self._position // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, type_id, offset in entries:
            if name in tensors:
                raise self._damaged(f"tensor {name!r} occurs twice")
            tensors[name] = self._locate(name, shape, type_id, data_start + offset)
        return tensors

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor name")
        num_dims = self._scalar(_U32, name)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._damaged(f"tensor {name!r} has {num_dims} dimensions; 1 to {_MAX_DIMS} are expected")
        shape = tuple(self._scalar(_U64, name) for _ in range(num_dims))
        return name, shape[::-1], self._scalar(_U32, name), self._scalar(_U64, name)

    def _locate(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> TensorInfo:
        tensor_type = _TYPES.get(type_id)
        if tensor_type is None:
            raise UnsupportedModelError(f"{self._path}: tensor {name!r} has the unknown ggml type {type_id}")
        if shape[-1] % tensor_type.block_size:
            raise self._damaged(
                f"tensor {name!r}: rows of {shape[-1]} numbers do not fill {tensor_type.name} blocks of "
                f"{tensor_type.block_size}"
            )
        nbytes = math.prod(shape) // tensor_type.block_size * tensor_type.block_bytes
        if offset + nbytes > self._size:
            raise self._damaged(
                f"tensor {name!r} ends at byte {offset + nbytes}, but the file has {self._size} bytes: "
                "the download may be incomplete"
            )
        return TensorInfo(name, shape, tensor_type, offset, nbytes)

    def _value(self, value_type: int, key: str, *, depth: int) -> Any:
        if value_type == _STRING:
            return self._string(key)
        if value_type == _ARRAY:
            return self._array(key, depth=depth)
        if value_type not in _SCALARS:
            raise self._damaged(f"{key}: unknown value type {value_type}")
        return self._scalar(_SCALARS[value_type], key)

    def _array(self, key: str, *, depth: int) -> Any:
        if depth == _MAX_ARRAY_DEPTH:
            raise self._damaged(f"{key}: arrays nested more than {_MAX_ARRAY_DEPTH} deep")
        item_type = self._scalar(_U32, key)
        if item_type == _STRING:
            return self._strings(self._count(8, key), key)
        if item_type == _ARRAY:
            return [self._array(key, depth=depth + 1) for _ in range(self._count(4 + 8, key))]
        if item_type not in _SCALARS:
            raise self._damaged(f"{key}: unknown item type {item_type}")
        dtype = np.dtype("<u1" if item_type == _BOOL else _SCALARS[item_type].format)
        count = self._count(dtype.itemsize, key)
        start = self._take(count * dtype.itemsize, key)
        # Copied, because the map is closed when the reader is done.
        items = np.frombuffer(self._buffer[start : self._position], dtype)
        return items.astype(np.bool_) if item_type == _BOOL else items

    def _strings(self, count: int, key: str) -> list[str]:
        """The one hot loop: a vocabulary and its merges are some 10^5 strings, so it works on local names."""
        buffer, size, position, unpack = self._buffer, self._size, self._position, _U64.unpack_from
        strings = []
        try:
            for _ in range(count):
                end = position + 8 + unpack(buffer, position)[0]
                if end > size:
                    raise self._damaged(f"{key}: a string ends at byte {end}, but the file has {size} bytes")
                strings.append(buffer[position + 8 : end].decode("utf-8"))
                position = end
        except struct.error as error:
            raise self._damaged(f"{key}: a string starts at byte {position}, but the file has {size} bytes") from error
        except UnicodeDecodeError as error:
            raise self._damaged(f"{key}: the string at byte {position} is not UTF-8") from error
        self._position = position
        return strings

    def _string(self, what: str) -> str:
        return self._strings(1, what)[0]

    def _scalar(self, form: struct.Struct, what: str) -> Any:
        return form.unpack_from(self._buffer, self._take(form.size, what))[0]

    def _count(self, item_bytes: int, what: str, *, also_ahead: int = 0) -> int:
        """Read a count and check that so many items of at least ``item_bytes`` fit into the rest of the file."""
        count = self._scalar(_U64, what)
        rest = self._size - self._position - also_ahead
        if count * item_bytes > rest:
            raise self._damaged(
                f"{what}: {count} items of at least {item_bytes} bytes in the last {rest} of {self._size} bytes"
            )
        return int(count)

    def _take(self, num_bytes: int, what: str) -> int:
        """Advance by ``num_bytes`` and return where they start."""
        start = self._position
        if start + num_bytes > self._size:
            raise self._damaged(f"{what} ends at byte {start + num_bytes}, but the file has {self._size} bytes")
        self._position = start + num_bytes
        return start

    def _damaged(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self._path}: {what}")
