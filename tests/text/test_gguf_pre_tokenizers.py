"""Byte-level tokenizers of GGUF files give the ids of the transformers class that their models use."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import train_tokenizer, write_gguf, write_hf_model
from tokenizers import Regex, pre_tokenizers

from pagedllm.files.locate import ModelFiles
from pagedllm.text.tokenizer import Tokenizer, load_tokenizer

# As Llama 3's tokenizer.json has it.
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # noqa: E501
TEXTS = st.text() | st.text(alphabet="the cache's 0123456789\r\n\tÅA\u030aé½Ⅷ.,!😀'LL")
CONTROL = "a<|endoftext|>b"  # plain text to tokenizers without control tokens


def without_special_tokens(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """They would be found in texts; the files written here have none."""
    return tokenizers.Tokenizer.from_str(json.dumps(json.loads(backend.to_str()) | {"added_tokens": []}))


@functools.cache
def plain() -> tokenizers.Tokenizer:
    return without_special_tokens(train_tokenizer())


@functools.cache
def qwen2() -> tokenizers.Tokenizer:
    """Its class adds a special token by itself."""
    return without_special_tokens(transformers.Qwen2Tokenizer(**parts()).backend_tokenizer)


def parts() -> dict[str, Any]:
    model = json.loads(train_tokenizer().to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(merge) for merge in model["merges"]]}


@functools.cache
def llama3() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(**parts(), ignore_merges=True))
    split = pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return backend


@pytest.fixture(scope="module")
def from_gguf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("pre")
    model = write_hf_model(folder, "qwen2", num_layers=1)
    loaded = {}
    for name in ("qwen2", "llama-bpe", "llama3", "gpt-2"):
        # No control tokens: the references have none.
        metadata = {"tokenizer.ggml.pre": name, "tokenizer.ggml.token_type": [1] * 320}
        write_gguf(folder / "m.gguf", model, metadata=metadata)
        loaded[name] = load_tokenizer(ModelFiles("m", "gguf", Path(folder / "m.gguf")))
    return loaded


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
@example(text=CONTROL)
def test_qwen2_and_qwen3(from_gguf: dict[str, Tokenizer], text: str) -> None:
    """Single digits, Unicode's composed form; Qwen 3 goes by the same name."""
    assert from_gguf["qwen2"].encode(text) == qwen2().encode(text, add_special_tokens=False).ids


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
@example(text=CONTROL)
def test_llama3(from_gguf: dict[str, Tokenizer], text: str) -> None:
    """Digits by three, under two of its names."""
    expected = llama3().encode(text).ids
    for name in ("llama-bpe", "llama3"):
        assert from_gguf[name].encode(text, add_special_tokens=False) == expected


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
@example(text=CONTROL)
def test_gpt2(from_gguf: dict[str, Tokenizer], text: str) -> None:
    """The plain one."""
    assert from_gguf["gpt-2"].encode(text) == plain().encode(text).ids
