"""A ``tokenizers.Tokenizer`` from the metadata of a GGUF file; transformers takes seconds to convert one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import ModelFileError, UnsupportedModelError
from ..files.gguf_metadata import GGUFFile, read_gguf
from .gguf_sentencepiece import sentencepiece_encoder, token_types, vocabulary

__all__ = ["GGUFTokenizerParts", "load_gguf_tokenizer"]

# llama.cpp's token types.
_CONTROL, _USER_DEFINED = 3, 4

# Words, numbers, punctuation and white space as the models' own tokenizer.json split them.
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class GGUFTokenizerParts:
    """What a GGUF file says about text.

    Args:
        backend: Encodes and decodes; adds BOS and EOS where the file asks for it.
        gguf: The metadata it came from.
        chat_template: Jinja source, or None.
        bos_token: Its text; empty if there is none.
        eos_token: Likewise.
    """

    backend: Tokenizer
    gguf: GGUFFile
    chat_template: str | None
    bos_token: str
    eos_token: str


@dataclass(frozen=True)
class _Kind:
    """What a name in ``tokenizer.ggml.pre`` stands for.

    Args:
        pre_tokenizer: Builds it.
        ignore_merges: A word that is a token as a whole is not merged from its parts.
        add_bos: Whether BOS is added when the file does not say.
        nfc: Whether text is brought into Unicode's composed form first.
    """

    pre_tokenizer: Callable[[], Any]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


def _byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _split(numbers: str) -> Any:
    split = pre_tokenizers.Split(Regex(_SPLIT % numbers), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# Names are llama.cpp's. Qwen3 calls itself qwen2 here.
_KINDS = {
    "default": _Kind(_byte_level),
    "gpt-2": _Kind(_byte_level),
    "smollm": _Kind(_single_digits),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3"),
        _Kind(lambda: _split(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True),
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Kind(lambda: _split(r"\p{N}"), nfc=True)),
}


def load_gguf_tokenizer(path: Path) -> GGUFTokenizerParts:
    """Build the tokenizer of a GGUF file.

    Raises:
        UnsupportedModelError: A vocabulary or pre-tokenizer that we do not implement, by name.
        ModelFileError: Missing or inconsistent metadata.
    """
    gguf = read_gguf(path)
    tokens = _strings(gguf, "tokenizer.ggml.tokens")
    model = gguf.metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        kind = _kind(gguf)
        backend, adds_bos = _byte_pair_encoder(gguf, tokens, kind), kind.add_bos
    elif model == "llama":
        backend, adds_bos = sentencepiece_encoder(gguf, tokens), True
    else:
        raise UnsupportedModelError(
            f"{path}: tokenizer.ggml.model={model!r} is not supported; gpt2 (byte-level BPE) and llama are"
        )
    _add_special_tokens(gguf, backend, tokens)
    bos_token, eos_token = _token(gguf, tokens, "bos"), _token(gguf, tokens, "eos")
    _add_post_processor(gguf, backend, bos_token, eos_token, adds_bos=adds_bos)
    template = gguf.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelFileError(f"{path}: tokenizer.chat_template is not a text")
    return GGUFTokenizerParts(backend, gguf, template, bos_token, eos_token)


def _kind(gguf: GGUFFile) -> _Kind:
    pre = gguf.metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in _KINDS:
        raise UnsupportedModelError(
            f"{gguf.path}: tokenizer.ggml.pre={pre!r} is not supported; supported: {', '.join(_KINDS)}"
        )
    return _KINDS[pre]


def _byte_pair_encoder(gguf: GGUFFile, tokens: list[str], kind: _Kind) -> Tokenizer:
    # Some vocabularies lack tokens for rare bytes (SmolLM2 for 21 of 256). As in the models' own tokenizer, these bytes
    # are dropped from a text.
    vocab = vocabulary(gguf, tokens)
    pairs = (merge.partition(" ") for merge in _strings(gguf, "tokenizer.ggml.merges"))
    merges = [(left, right) for left, _, right in pairs]
    try:
        backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=kind.ignore_merges))
    except Exception as error:  # tokenizers raises plain Exception; a merge of other than two known tokens ends here
        raise ModelFileError(f"{gguf.path}: tokenizer.ggml.merges do not fit the vocabulary: {error}") from error
    if kind.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = kind.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _add_special_tokens(gguf: GGUFFile, backend: Tokenizer, tokens: list[str]) -> None:
    for token, token_type in zip(tokens, token_types(gguf, tokens), strict=False):
        # Not normalised: these are matched in the text as they are, before anything else sees it.
        if token_type == _CONTROL:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, special=False, normalized=False)])


def _add_post_processor(gguf: GGUFFile, backend: Tokenizer, bos_token: str, eos_token: str, *, adds_bos: bool) -> None:
    """Surround texts with BOS and EOS where the file (or, if it is silent, the kind of tokenizer) asks for it."""
    add_bos = gguf.metadata.get("tokenizer.ggml.add_bos_token", adds_bos)
    add_eos = gguf.metadata.get("tokenizer.ggml.add_eos_token", False)
    around = [token for token, is_added in ((bos_token, add_bos), (eos_token, add_eos)) if is_added]
    if "" in around:
        raise ModelFileError(f"{gguf.path}: BOS or EOS is to be added to texts, but the file does not name it")
    if around:
        template = [*([bos_token] if add_bos else []), "$A", *([eos_token] if add_eos else [])]
        special_tokens = [(token, backend.token_to_id(token)) for token in set(around)]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special_tokens)


def _token(gguf: GGUFFile, tokens: list[str], which: str) -> str:
    """Text of the token that ``tokenizer.ggml.<which>_token_id`` names, or an empty one."""
    key = f"tokenizer.ggml.{which}_token_id"
    token_id = gguf.metadata.get(key)
    if token_id is None:
        return ""
    if type(token_id) is not int or not 0 <= token_id < len(tokens):
        raise ModelFileError(f"{gguf.path}: {key} is {token_id!r}; the vocabulary has {len(tokens)} tokens")
    return tokens[token_id]


def _strings(gguf: GGUFFile, key: str) -> list[str]:
    value = gguf.metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelFileError(f"{gguf.path}: {key} is missing or not a list of strings")
    return value
