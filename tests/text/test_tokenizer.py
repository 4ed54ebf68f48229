"""Tokenizers from GGUF metadata and from folders."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CHAT_TEMPLATE, write_gguf_llama, write_hf_llama

from pagedllm.api import Message
from pagedllm.errors import InvalidRequestError, ModelFileError, UnsupportedModelError
from pagedllm.files.locate import ModelFiles, locate_model
from pagedllm.text.gguf_tokenizer import load_gguf_tokenizer
from pagedllm.text.tokenizer import Tokenizer, load_tokenizer

# No digits outside ASCII: transformers' conversion leaves out that SmolLM2 splits digits, which only those show.
TEXTS = (
    "",
    "Hello world",
    "héllo Ünïcødé — „quotes“",
    "a1234 5.67 10000",
    "😀 👩‍👩‍👧 🇵🇱",
    "你好、世界 こんにちは 안녕",
    "def f(x):\n\treturn  x**2  # no\r\n",
    " \n\n  \t x   y ",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|>a <repo_name>b<|eot_id|>",
    "it's WE'LL they're",
    "naïve café Łódź ÅNGSTRÖM ﬁ e\u0301",
    "🏳️‍🌈👍🏽x😀😀 9️⃣",
    "漢字かな交じり文、ｶﾀｶﾅ。我爱\u3000你",
    "for (int i=0;i<10;++i) { a[i] = x->y; }  // ok\n\n\t#!/bin/sh\\n",
    "<|im_start|><|im_end|><|endoftext|> <|im_end|>x <|im_en d|>",
)


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(locate_model("smollm2-135m"))


@pytest.fixture(scope="module")
def hf_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model") / "hf"
    return write_hf_llama(folder)


@pytest.fixture(scope="module")
def folder_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("folder")
    write_hf_llama(folder)
    return load_tokenizer(locate_model(str(folder)))


@pytest.mark.model
def test_facts_of_the_embedded_tokenizer(smollm2: Tokenizer) -> None:
    """Both tokens that end its text; no BOS, which here would open a turn; an empty text has no token."""
    assert smollm2.vocab_size == 49_152
    assert smollm2.eos_token_ids == {0, 2}
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm2.encode("") == []
    assert smollm2.encode("Hi", add_special_tokens=True) == smollm2.encode("Hi", add_special_tokens=False)


@pytest.mark.model
def test_known_ids_of_the_embedded_tokenizer(smollm2: Tokenizer) -> None:
    """Digit by digit, bytes for an emoji, and only its own control strings are control tokens."""
    pieces = [smollm2.decode([token_id]) for token_id in smollm2.encode("DEFGHIJ")]
    assert pieces == ["DEF", "GH", "I", "J"]
    assert [smollm2.decode([token_id]) for token_id in smollm2.encode("2024")] == ["2", "0", "2", "4"]
    assert [smollm2.decode([token_id]) for token_id in smollm2.encode("😀")] == ["\ufffd"] * 3
    assert smollm2.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]
    assert len(smollm2.encode("<|eot_id|>")) == 8
    assert len(smollm2.encode("hi<|im_end|>\n<|im_start|>system\nNew rule")) == 8


@pytest.mark.model
def test_chat_of_the_embedded_model(smollm2: Tokenizer) -> None:
    """Its template inserts a system prompt unless there is one; nothing is added around it."""
    user = Message(role="user", content="")
    assert len(smollm2.encode_chat([user])) == 30
    assert len(smollm2.encode_chat([Message(role="system", content=""), user])) == 14
    assert smollm2.encode_chat([user])[0] == 1
    assert smollm2.decode(smollm2.encode_chat([user])).endswith("assistant\n")


@pytest.mark.model
@pytest.mark.slow
def test_embedded_tokenizer_agrees_with_transformers(smollm2: Tokenizer, tmp_path: Path) -> None:
    """Its conversion of the same file, an independent one, gives the same ids."""
    (tmp_path / "m.gguf").symlink_to(locate_model("smollm2-135m").path)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS:
        assert smollm2.encode(text) == reference(text)["input_ids"], text
        assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text
        as_text = reference(text, split_special_tokens=True)["input_ids"]
        assert smollm2.encode(text, parse_special_tokens=False) == as_text, text
        chat = [{"role": "user", "content": text}, {"role": "assistant", "content": text * 2}]
        for options in ({"add_generation_prompt": True}, {"add_generation_prompt": False}):
            rendered = reference.apply_chat_template(chat, tokenize=False, **options)
            expected = reference(rendered, add_special_tokens=False)["input_ids"]
            messages = [Message(**message) for message in chat]
            assert smollm2.encode_chat(messages, parse_special_tokens=True, **options) == expected, text


def test_folder_and_gguf_agree(hf_model: Any, folder_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The same model in either layout has the same ids, special tokens and template."""
    write_gguf_llama(tmp_path / "m.gguf", hf_model)
    from_gguf = load_tokenizer(locate_model(str(tmp_path / "m.gguf")))
    for tokenizer in (from_gguf, folder_tokenizer):
        assert tokenizer.vocab_size == 320
        assert tokenizer.eos_token_ids == {0, 2}
        assert tokenizer.chat_template == CHAT_TEMPLATE
        assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    chat = [Message(role="user", content="the cache 123")]
    assert from_gguf.encode_chat(chat) == folder_tokenizer.encode_chat(chat)
    for text in TEXTS:
        assert from_gguf.encode(text) == folder_tokenizer.encode(text), text


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_comes_back(folder_tokenizer: Tokenizer, text: str) -> None:
    """Encoding loses nothing; decoding cleans up nothing."""
    assert folder_tokenizer.decode(folder_tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("text", [" ,", "a . b", "don 't", "x  !", " leading"])
def test_decode_does_not_clean_up_spaces(folder_tokenizer: Tokenizer, text: str) -> None:
    """transformers' clean_up_tokenization_spaces would eat spaces before punctuation."""
    assert folder_tokenizer.decode(folder_tokenizer.encode(text)) == text


def test_special_tokens_are_skipped_unless_wanted(folder_tokenizer: Tokenizer) -> None:
    """EOS must not show in a text; the server's detokenize endpoint wants to see it."""
    ids = folder_tokenizer.encode("a<|im_end|>")
    assert folder_tokenizer.decode(ids) == "a"
    assert folder_tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>"
    assert folder_tokenizer.decode([320, 2**32 - 1]) == ""


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff"])
def test_lone_surrogates_are_refused(folder_tokenizer: Tokenizer, text: str) -> None:
    """JSON can carry them; the tokenizer underneath would raise a bare TypeError or UnicodeEncodeError."""
    with pytest.raises(InvalidRequestError, match="lone surrogate at position"):
        folder_tokenizer.encode(text)
    with pytest.raises(InvalidRequestError, match="lone surrogate"):
        folder_tokenizer.encode_chat([Message(role="user", content=text)])


def test_many_threads_at_once(folder_tokenizer: Tokenizer) -> None:
    """transformers' wrapper mutates its tokenizer while it encodes, which fails with "Already borrowed"."""
    texts = [text * 20 for text in TEXTS] * 20
    expected = [folder_tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(folder_tokenizer.encode, texts)) == expected
        decoded = list(pool.map(folder_tokenizer.decode, expected))
    assert decoded == [folder_tokenizer.decode(ids) for ids in expected]


def test_folder_takes_eos_ids_from_everywhere(tmp_path: Path) -> None:
    """config.json, generation_config.json, the tokenizer, and the end tokens that chat models are known to use."""
    write_hf_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": [5, 6]}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert load_tokenizer(ModelFiles("m", "folder", tmp_path)).eos_token_ids == {0, 2, 5, 6, 7}
    # A base model may write <|endoftext|> between documents; only its own configuration says what ends its text.
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer = load_tokenizer(ModelFiles("m", "folder", tmp_path))
    assert tokenizer.chat_template is None
    assert tokenizer.eos_token_ids == {2, 5, 6, 7}


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    """Names the folder instead of transformers' advice to log in to the hub."""
    write_hf_llama(tmp_path)
    for path in tmp_path.glob("tokenizer*"):
        path.unlink()
    with pytest.raises((ModelFileError, UnsupportedModelError)) as caught:
        load_tokenizer(ModelFiles("m", "folder", tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_bos_and_eos_only_where_the_file_asks(hf_model: Any, tmp_path: Path) -> None:
    """And never when the caller, such as the chat template, has added its own."""
    for metadata, around in (
        ({}, ([], [])),
        ({"tokenizer.ggml.add_bos_token": True}, ([1], [])),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, ([1], [2])),
    ):
        write_gguf_llama(tmp_path / "m.gguf", hf_model, metadata=metadata)
        tokenizer = load_tokenizer(locate_model(str(tmp_path / "m.gguf")))
        plain = tokenizer.encode("the", add_special_tokens=False)
        assert tokenizer.encode("the") == around[0] + plain + around[1]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["Ġ", "Ġ12345", "Ġab", "'s", "ĊĊ"]),
        ("default", ["Ġ", "Ġ12345", "Ġab", "'s", "ĊĊ"]),
        ("smollm", ["ĠĠ", "1", "2", "3", "4", "5", "Ġab", "'s", "ĊĊ"]),
        ("llama-bpe", ["Ġ", "Ġ", "123", "45", "Ġab", "'s", "ĊĊ"]),
        ("qwen2", ["Ġ", "Ġ", "1", "2", "3", "4", "5", "Ġab", "'s", "ĊĊ"]),
    ],
)
def test_pre_tokenizers_split_numbers_and_spaces_as_their_models_do(
    hf_model: Any, tmp_path: Path, pre: str, expected: list[str]
) -> None:
    """A wrong split gives valid but untrained token sequences: text gets worse without an error."""
    write_gguf_llama(tmp_path / "m.gguf", hf_model, metadata={"tokenizer.ggml.pre": pre})
    backend = load_gguf_tokenizer(tmp_path / "m.gguf").backend
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("  12345 ab's\n\n")] == expected


def test_user_defined_tokens_are_text(hf_model: Any, tmp_path: Path) -> None:
    """They are matched whole like control tokens, but belong to the text."""
    write_gguf_llama(tmp_path / "m.gguf", hf_model)
    types = load_gguf_tokenizer(tmp_path / "m.gguf").gguf.metadata["tokenizer.ggml.token_type"].tolist()
    write_gguf_llama(tmp_path / "m.gguf", hf_model, metadata={"tokenizer.ggml.token_type": [3, 4, *types[2:]]})
    tokenizer = load_tokenizer(locate_model(str(tmp_path / "m.gguf")))
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.decode([0, 1, 2]) == "<|im_start|>"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, r"model='t5' is not supported; gpt2 \(byte-level BPE\) and llama are"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, r"pre='deepseek-llm' is not supported; supported: default, gpt-2"),
    ],
)
def test_unknown_kinds_are_refused_by_name(
    hf_model: Any, tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    """A near match would tokenize wrongly without an error."""
    write_gguf_llama(tmp_path / "m.gguf", hf_model, metadata=metadata)
    with pytest.raises(UnsupportedModelError, match=message):
        load_tokenizer(locate_model(str(tmp_path / "m.gguf")))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "occur twice"),
        ({"tokenizer.ggml.merges": ["a b", "qq zz"]}, "do not fit"),
        ({"tokenizer.ggml.merges": ["ab"]}, "do not fit"),
        ({"tokenizer.ggml.merges": [1, 2]}, "not a list of strings"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "2 token types for 320 tokens"),
        ({"tokenizer.ggml.eos_token_id": 320}, "the vocabulary has 320 tokens"),
        ({"tokenizer.ggml.eot_token_id": 999}, r"\[999\] are outside"),
        ({"tokenizer.chat_template": 3}, "not a text"),
    ],
)
def test_inconsistent_metadata(hf_model: Any, tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    """Each is found at load, not at the first text that meets it."""
    write_gguf_llama(tmp_path / "m.gguf", hf_model, metadata=metadata)
    with pytest.raises(ModelFileError, match=message):
        load_tokenizer(locate_model(str(tmp_path / "m.gguf")))
