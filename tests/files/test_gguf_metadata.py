"""The GGUF reader: agrees with the gguf package on good files, and has one kind of answer to bad ones."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedllm.errors import ModelFileError, PagedLLMError, UnsupportedModelError
from pagedllm.files.gguf_metadata import _TYPES, read_gguf
from pagedllm.files.locate import locate_model


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    """Every kind of value and two tensors, about 1 KB."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -1)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -2)
    writer.add_int32("i32", -3)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -4)
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "zażółć")
    writer.add_array("words", ["a", "", "你好"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("flags", [True, False])
    writer.add_tensor("matrix", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("half", np.ones(5, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_reads_every_kind_of_value(small_file: Path) -> None:
    """One wrong width would shift all that follows."""
    file = read_gguf(small_file)
    numbers, flags = file.metadata.pop("numbers"), file.metadata.pop("flags")
    assert numbers.tolist() == [1, 2, 3]
    assert flags.tolist() == [True, False]
    assert file.metadata == {
        "general.architecture": "llama",
        **{"u8": 255, "i8": -1, "u16": 65535, "i16": -2, "i32": -3, "u64": 2**63, "i64": -4},
        **{"f32": 0.5, "f64": 0.1, "yes": True, "text": "zażółć", "words": ["a", "", "你好"]},
    }
    assert file.architecture == "llama"


def test_tensor_offsets_are_absolute_and_shapes_in_numpy_order(small_file: Path) -> None:
    """The file has dimensions fastest first and offsets from the data's start."""
    matrix = read_gguf(small_file).tensors["matrix"]
    assert matrix.shape == (2, 3)
    raw = small_file.read_bytes()[matrix.offset : matrix.offset + matrix.nbytes]
    assert np.frombuffer(raw, np.float32).tolist() == [0, 1, 2, 3, 4, 5]


def test_type_table_agrees_with_the_gguf_package() -> None:
    """A wrong block size would place every later read wrongly, without an error."""
    for kind, (block_size, block_bytes) in GGML_QUANT_SIZES.items():
        if kind in _TYPES:
            ours = _TYPES[kind]
            assert (ours.name, ours.block_size, ours.block_bytes) == (kind.name, block_size, block_bytes)
    assert {int(kind) for kind in GGML_QUANT_SIZES} >= set(_TYPES)


@pytest.mark.model
def test_embedded_file() -> None:
    """Tensors where the file's size says they must end, and the whole vocabulary."""
    path = locate_model("smollm2-135m").path
    file = read_gguf(path)
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49_152
    assert len(file.tensors) == 272
    embedding = file.tensors["token_embd.weight"]
    assert (embedding.shape, embedding.type.name) == ((49_152, 576), "Q8_0")
    assert max(info.offset + info.nbytes for info in file.tensors.values()) == path.stat().st_size


@pytest.mark.model
@pytest.mark.slow
def test_embedded_file_agrees_with_the_gguf_package() -> None:
    """An independent reader sees the same tensors in the same places."""
    path = locate_model("smollm2-135m").path
    ours = read_gguf(path).tensors
    for tensor in gguf.GGUFReader(path).tensors:
        info = ours.pop(tensor.name)
        assert info.shape == tuple(tensor.shape.tolist()[::-1])
        assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert info.type.name == tensor.tensor_type.name
    assert not ours


def test_truncated_file_says_the_numbers(small_file: Path) -> None:
    """An interrupted download, wherever it stopped, is told from a good file without reading tensor data."""
    whole = small_file.read_bytes()
    end = max(info.offset + info.nbytes for info in read_gguf(small_file).tensors.values())
    for size in range(end):
        small_file.write_bytes(whole[:size])
        with pytest.raises(ModelFileError, match=str(size)):
            read_gguf(small_file)


@pytest.mark.parametrize("magic", [b"GGML", b"FUGG", b"PK\3\4", b"\0\0\0\0"])
def test_bad_magic(small_file: Path, magic: bytes) -> None:
    """Older formats, archives and empty disks are named as what they are not."""
    small_file.write_bytes(magic + small_file.read_bytes()[4:])
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        read_gguf(small_file)


@pytest.mark.parametrize(
    ("version", "message"), [(b"\0\0\0\3", "big-endian"), (b"\1\0\0\0", "version 1"), (b"\4\0\0\0", "version 4")]
)
def test_other_versions_and_byte_orders(small_file: Path, version: bytes, message: str) -> None:
    """A big-endian file must not be read as one with astronomic counts."""
    raw = small_file.read_bytes()
    small_file.write_bytes(raw[:4] + version + raw[8:])
    with pytest.raises(UnsupportedModelError, match=message):
        read_gguf(small_file)


@pytest.mark.parametrize(("offset", "count"), [(8, 2**63), (8, 10**6), (16, 2**64 - 1), (16, 10**6)])
def test_astronomic_counts_allocate_nothing(small_file: Path, offset: int, count: int) -> None:
    """A count is checked against the file's size before a loop or an array is made for it."""
    raw = bytearray(small_file.read_bytes())
    raw[offset : offset + 8] = struct.pack("<Q", count)
    small_file.write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match=f"{count} items of at least"):
            read_gguf(small_file)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_tensor_past_the_end(small_file: Path) -> None:
    """Its name, its end and the file's size are what one needs to see that the rest is missing."""
    raw = small_file.read_bytes()
    place = raw.index(b"matrix") + len(b"matrix") + 4
    small_file.write_bytes(raw[:place] + struct.pack("<Q", 2**40) + raw[place + 8 :])
    with pytest.raises(ModelFileError, match=rf"'matrix' ends at byte \d+, but the file has {len(raw)} bytes"):
        read_gguf(small_file)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    """Operating system errors become ours."""
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelFileError, match="cannot be read"):
            read_gguf(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(st.tuples(st.integers(0, 1200), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4),
    cut=st.none() | st.integers(0, 1200),
)
def test_mutated_bytes_never_crash(small_file: Path, changes: list[tuple[int, bytes]], cut: int | None) -> None:
    """Whatever a file says, the answer is metadata or a PagedLLMError, never another exception, hang or memory bomb."""
    pristine = small_file.with_suffix(".orig")
    if not pristine.exists():
        pristine.write_bytes(small_file.read_bytes())
    raw = bytearray(pristine.read_bytes())
    for place, values in changes:
        raw[place : place + len(values)] = values
    small_file.write_bytes(raw[:cut])
    try:
        file = read_gguf(small_file)
    except PagedLLMError:
        return
    assert all(info.offset + info.nbytes <= len(raw) for info in file.tensors.values())
