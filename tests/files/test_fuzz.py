"""Damaged model files, made by changing good ones: the answer is metadata or a PagedLLMError, in bounded memory.

Mutations know where counts and lengths stand, because random bytes rarely hit them: a GGUF header is a chain of
lengths, a safetensors header one length and JSON.
"""

from __future__ import annotations

import json
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_models import train_tokenizer, write_gguf, write_hf_model

from pagedllm.compute.models.config import load_model_config
from pagedllm.compute.weights import iter_weights
from pagedllm.errors import PagedLLMError
from pagedllm.files.description import describe_model, read_generation_defaults
from pagedllm.files.gguf_metadata import read_gguf
from pagedllm.files.locate import ModelFiles
from pagedllm.files.safetensors_metadata import read_safetensors
from pagedllm.text.gguf_tokenizer import load_gguf_tokenizer

SLOW_SECONDS = 60
# Python's own numbers and strings take some 60 bytes where a file has one or eight.
MAX_BYTES_PER_BYTE, FREE_BYTES = 64, 2**20
NUMBERS = (0, 1, 2, 7, 8, 9, 31, 32, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)


def small_gguf(path: Path) -> bytes:
    """Every kind of value, nested arrays and three tensors, about 1 KB."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 255)
    writer.add_int64("i64", -4)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "zażółć")
    writer.add_array("words", ["a", "", "你好"] * 5)
    writer.add_array("numbers", list(range(20)))
    writer.add_array("nested", [[1, 2], [3]])
    writer.add_tensor("matrix", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("half", np.ones(5, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def small_safetensors(path: Path) -> bytes:
    save_file({"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, path, metadata={"format": "pt"})
    return path.read_bytes()


def mutate(raw: bytes, choose: random.Random) -> bytes:
    """One to five changes: bytes, whole numbers, pieces moved, doubled or cut out, and the end cut off."""
    data = bytearray(raw)
    for _ in range(choose.randint(1, 5)):
        place, length = choose.randrange(len(data) + 1), choose.choice((1, 2, 4, 8, 16, 64))
        kind = choose.randrange(6)
        if kind == 0:
            data[place : place + 1] = bytes([choose.randrange(256)])
        elif kind == 1:
            data[place : place + 8] = struct.pack("<Q", choose.choice(NUMBERS))
        elif kind == 2:
            data[place : place + 4] = struct.pack("<I", choose.choice(NUMBERS) & 0xFFFFFFFF)
        elif kind == 3:
            source = choose.randrange(len(data) + 1)
            data[place:place] = data[source : source + length]
        elif kind == 4:
            del data[place : place + length]
        else:
            data = data[:place] if choose.random() < 0.3 else data
    return bytes(data)


def mutate_header(raw: bytes, choose: random.Random) -> bytes:
    """A safetensors file whose JSON is changed as a text, with a header length that still fits it."""
    (length,) = struct.unpack_from("<Q", raw)
    header, data = bytearray(raw[8 : 8 + length]), raw[8 + length :]
    words = (
        b"{",
        b"[" * 2000,
        b"]",
        b"-1",
        b"1e999",
        b"NaN",
        b"9" * 5000,
        b"null",
        b'"',
        b",",
        b":",
        b'"a":{}',
        b"\\ud800",
    )
    for _ in range(choose.randint(1, 4)):
        place = choose.randrange(len(header) + 1)
        header[place : place + choose.choice((0, 1, 4))] = choose.choice(words)
    return struct.pack("<Q", len(header)) + bytes(header) + data


def mutate_entry(raw: bytes, choose: random.Random) -> bytes:
    """A safetensors file with one value of its header replaced by one of another kind or size."""
    (length,) = struct.unpack_from("<Q", raw)
    try:
        header = json.loads(raw[8 : 8 + length])
    except (ValueError, RecursionError):
        return mutate(raw, choose)  # what an earlier mutation left
    values = (None, True, -1, 0, 2**63, 1.5, "", "F32", "BF16", [], [2, 3], [0, 24], [None], ["1"], [1.0], {}, {"a": 1})
    parent: Any = {"header": header}
    key: Any = "header"
    while isinstance(parent[key], (dict, list)) and parent[key] and choose.random() < 0.8:
        parent = parent[key]
        key = choose.choice(list(parent)) if isinstance(parent, dict) else choose.randrange(len(parent))
    parent[key] = choose.choice(values)
    changed = json.dumps(header).encode()
    return struct.pack("<Q", len(changed)) + changed + raw[8 + length :]


def check(read: Callable[[], object], num_bytes: int) -> bool:
    """Run a reader; whether it found the file good. Its memory is bounded by the file's size.

    Raises:
        AssertionError: It took more.
        Exception: Whatever the reader raised besides PagedLLMError.
    """
    tracemalloc.start()
    try:
        read()
        is_good = True
    except PagedLLMError:
        is_good = False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak <= FREE_BYTES + MAX_BYTES_PER_BYTE * num_bytes, f"{peak} bytes for a file of {num_bytes}"
    return is_good


def check_gguf(path: Path, data: bytes) -> bool:
    path.write_bytes(data)
    return check(lambda: read_gguf(path), len(data))


def check_safetensors(path: Path, data: bytes) -> bool:
    path.write_bytes(data)
    return check(lambda: read_safetensors(path.parent), len(data))


FILES: dict[str, tuple[Callable[[Path], bytes], tuple[Callable[..., bytes], ...], Callable[[Path, bytes], bool]]] = {
    "model.gguf": (small_gguf, (mutate,), check_gguf),
    "model.safetensors": (small_safetensors, (mutate, mutate_header, mutate_entry), check_safetensors),
}


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_short(tmp_path: Path, name: str, seed: int) -> None:
    """A few hundred files in every run of the tests."""
    write, mutations, check_file = FILES[name]
    choose = random.Random(seed)
    check_file(tmp_path / name, choose.choice(mutations)(write(tmp_path / name), choose))


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_long(tmp_path: Path, name: str) -> None:
    """Some 10^4 files, each mutation upon mutation of the last that was still good."""
    write, mutations, check_file = FILES[name]
    original = write(tmp_path / name)
    current, num_files, num_good, end = original, 0, 0, time.monotonic() + SLOW_SECONDS
    while time.monotonic() < end:
        choose = random.Random(num_files)
        data = choose.choice(mutations)(current, choose)
        num_files += 1
        is_good = check_file(tmp_path / name, data)
        num_good += is_good
        # Damage on top of what still reads goes deeper than damage on a good file.
        current = data if is_good and len(data) < 4 * len(original) else original
    assert num_files > 1000
    assert 0 < num_good < num_files


@pytest.fixture(scope="module")
def whole_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    write_gguf(path, write_hf_model(path.parent / "hf", "gemma2", num_layers=1), train_tokenizer())
    return path


@pytest.mark.parametrize("num_files", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_what_is_built_on_the_metadata(whole_model: Path, tmp_path: Path, num_files: int) -> None:
    """Description, configuration, tokenizer and the checks before the first weight take nothing on trust either."""
    raw, path = whole_model.read_bytes(), tmp_path / "model.gguf"
    header = raw.index(b"blk.0.attn_norm.weight") + 200
    files = ModelFiles("m", "gguf", path)
    readers = (
        lambda: describe_model(files),
        lambda: read_generation_defaults(files),
        lambda: load_gguf_tokenizer(path),
        lambda: iter_weights(files, load_model_config(files)),
    )
    for seed in range(num_files):
        choose = random.Random(seed)
        changed = bytearray(raw)
        # Within the header and without moving what follows, so that most of the file stays readable.
        for _ in range(choose.randint(1, 3)):
            place = choose.randrange(24, header)
            value = struct.pack("<I", choose.choice(NUMBERS) & 0xFFFFFFFF)[: choose.choice((1, 4))]
            changed[place : place + len(value)] = value
        path.write_bytes(changed)
        for read in readers:
            try:
                read()
            except PagedLLMError:
                continue


def test_deep_json_is_no_stack_overflow(tmp_path: Path) -> None:
    """Brackets are the cheapest way to a recursion error."""
    for deep in ("[" * 200_000, '{"a":' * 200_000, json.dumps({"a": 1})[:-1] + "[" * 100_000):
        raw = deep.encode()
        assert not check_safetensors(tmp_path / "model.safetensors", struct.pack("<Q", len(raw)) + raw)
