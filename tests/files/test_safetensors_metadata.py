"""Safetensors headers and the index that ties shards together."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from pagedllm.errors import ModelFileError, PagedLLMError, UnsupportedModelError
from pagedllm.files.safetensors_metadata import find_shards, read_safetensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards and their index."""
    save_file({"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, tmp_path / "x-1.safetensors")
    save_file({"c": torch.ones(5, dtype=torch.float16)}, tmp_path / "x-2.safetensors")
    write_index(tmp_path, {"a": "x-1.safetensors", "b": "x-1.safetensors", "c": "x-2.safetensors"})
    return tmp_path


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_header(folder: Path, header: Any, data: bytes = b"") -> None:
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def test_follows_the_index(folder: Path) -> None:
    """Each tensor with its own shard, type and shape."""
    tensors = read_safetensors(folder)
    assert {name: (info.file.name, info.dtype, info.shape) for name, info in tensors.items()} == {
        "a": ("x-1.safetensors", "F32", (2, 3)),
        "b": ("x-1.safetensors", "BF16", (4,)),
        "c": ("x-2.safetensors", "F16", (5,)),
    }


def test_missing_shard_is_named(folder: Path) -> None:
    """The usual damage of an interrupted download."""
    (folder / "x-2.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"x-2\.safetensors: missing"):
        read_safetensors(folder)


def test_tensor_missing_from_its_shard(folder: Path) -> None:
    """An index and shards of different checkpoints do not fit together."""
    write_index(folder, {"a": "x-2.safetensors", "c": "x-2.safetensors"})
    with pytest.raises(ModelFileError, match="tensor 'a' is missing"):
        read_safetensors(folder)


def test_tensor_in_two_shards(folder: Path) -> None:
    """Which of the two would win is not ours to choose."""
    save_file({"a": torch.zeros(2, 3), "c": torch.ones(5)}, folder / "x-2.safetensors")
    with pytest.raises(ModelFileError, match="'a' is both in"):
        read_safetensors(folder)


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "..", "", 3, "a\\b"])
def test_index_must_not_lead_out_of_the_folder(folder: Path, shard: Any) -> None:
    """An index comes from outside like the rest of a model."""
    write_index(folder, {"a": shard})
    with pytest.raises(ModelFileError, match="plain file name"):
        find_shards(folder)


def test_truncated_shard_says_the_numbers(folder: Path) -> None:
    """Found from the header alone, wherever the file was cut."""
    path = folder / "x-1.safetensors"
    whole = path.read_bytes()
    for size in (0, 7, 8, 20, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelFileError):
            read_safetensors(folder)
    with pytest.raises(ModelFileError, match=r"ends at data byte 32, but the file has 31 data bytes"):
        read_safetensors(folder)


@pytest.mark.parametrize(
    "entry",
    [
        3,
        {},
        {"dtype": "F32", "shape": [1], "data_offsets": [0]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
    ],
)
def test_damaged_entries(tmp_path: Path, entry: Any) -> None:
    """Type, shape and place must agree before anything is read by them."""
    write_header(tmp_path, {"w": entry}, b"\0" * 4)
    with pytest.raises(ModelFileError, match="'w'"):
        read_safetensors(tmp_path)


def test_unknown_type_is_named(tmp_path: Path) -> None:
    """A newer format than ours is not a damaged file."""
    write_header(tmp_path, {"w": {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4)
    with pytest.raises(UnsupportedModelError, match=r"'w'.*'F4'"):
        read_safetensors(tmp_path)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    """Some belong to other formats of the same model; reading all would mix them."""
    for name in ("a", "b"):
        save_file({"w": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelFileError, match=r"a\.safetensors, b\.safetensors"):
        find_shards(tmp_path)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 200), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4))
def test_mutated_bytes_never_crash(tmp_path: Path, changes: list[tuple[int, bytes]]) -> None:
    """Headers or a PagedLLMError, nothing else."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, path)
    raw = bytearray(path.read_bytes())
    for place, values in changes:
        raw[place : place + len(values)] = values
    path.write_bytes(raw)
    try:
        tensors = read_safetensors(tmp_path)
    except PagedLLMError:
        return
    assert all(info.nbytes <= len(raw) for info in tensors.values())
