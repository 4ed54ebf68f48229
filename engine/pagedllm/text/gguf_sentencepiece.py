"""SentencePiece vocabularies of GGUF files (``tokenizer.ggml.model = llama``), as Llama 2 and Mistral have them.

SentencePiece's BPE joins, again and again, the two neighbours whose joint piece has the highest score (Kudo and
Richardson 2018, arXiv 1808.06226). ``tokenizers`` joins by rank, so each way to split a piece in two becomes a merge,
in the order of the joint pieces' scores, as transformers' converter orders them.
"""

from __future__ import annotations

import math

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers

from ..errors import ModelFileError, UnsupportedModelError
from ..files.gguf_metadata import GGUFFile

__all__ = ["sentencepiece_encoder", "token_types", "vocabulary"]

_SPACE = "\u2581"
# SentencePiece's default is 16. Finding the splits of a piece takes the square of its length.
_MAX_PIECE_LENGTH = 512
_NORMAL, _UNKNOWN, _USER_DEFINED, _BYTE = 1, 2, 4, 6


def sentencepiece_encoder(gguf: GGUFFile, tokens: list[str]) -> Tokenizer:
    """Build the encoder; special tokens are the caller's.

    A space is put before the text and, as llama.cpp does, behind every special token in it.

    Raises:
        UnsupportedModelError: The vocabulary of a family whose particulars a GGUF file does not tell.
        ModelFileError: Missing or inconsistent metadata.
    """
    _refuse_particulars(gguf, tokens)
    types = token_types(gguf, tokens)
    scores = gguf.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens) or len(types) != len(tokens):
        raise ModelFileError(f"{gguf.path}: tokenizer.ggml.scores or token_type do not fit the {len(tokens)} tokens")
    unknown = [token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN]
    if sum(kind == _BYTE for kind in types) != 256 or len(unknown) != 1:
        raise ModelFileError(f"{gguf.path}: 256 byte tokens and one unknown token are expected in the vocabulary")
    pieces = {tokens[i]: float(scores[i]) for i, kind in enumerate(types) if kind == _NORMAL}
    if any(len(piece) > _MAX_PIECE_LENGTH for piece in pieces) or not all(map(math.isfinite, pieces.values())):
        raise ModelFileError(f"{gguf.path}: a token of more than {_MAX_PIECE_LENGTH} characters, or without a score")
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary(gguf, tokens),
            merges=_merges(pieces),
            unk_token=unknown[0],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    spelled = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*spelled, decoders.Strip(content=" ", left=1)])
    return backend


def _refuse_particulars(gguf: GGUFFile, tokens: list[str]) -> None:
    if gguf.architecture != "llama":
        # Phi-3 swallows white space behind its special tokens, Gemma has pieces of many spaces: neither is in the file.
        raise UnsupportedModelError(
            f"{gguf.path}: tokenizer.ggml.model='llama' is not supported for {gguf.architecture}, whose special tokens "
            "follow rules that a GGUF file does not tell; use the model's folder with safetensors and tokenizer.json"
        )
    if not gguf.metadata.get("tokenizer.ggml.add_space_prefix", True):
        raise UnsupportedModelError(f"{gguf.path}: tokenizer.ggml.add_space_prefix=False is not supported")
    for token, kind in zip(tokens, token_types(gguf, tokens), strict=False):
        if kind == _USER_DEFINED and _SPACE in token:
            raise UnsupportedModelError(f"{gguf.path}: the user-defined token {token!r} with a space is not supported")


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Every split of a piece into two others, by the piece's score, then the longer left and right part first."""
    ids = {piece: i for i, piece in enumerate(scores)}
    found: list[tuple[float, str, str]] = []
    for piece, score in scores.items():
        splits = [(piece[:i], piece[i:]) for i in range(1, len(piece)) if piece[:i] in ids and piece[i:] in ids]
        splits.sort(key=lambda split: (ids[split[0]], ids[split[1]]))
        found.extend((score, left, right) for left, right in splits)
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def vocabulary(gguf: GGUFFile, tokens: list[str]) -> dict[str, int]:
    """Token ids by token.

    Raises:
        ModelFileError: A token occurs twice.
    """
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelFileError(f"{gguf.path}: {len(tokens) - len(vocab)} tokens occur twice in tokenizer.ggml.tokens")
    return vocab


def token_types(gguf: GGUFFile, tokens: list[str]) -> list[int]:
    """llama.cpp's type of each token; empty if the file does not say.

    Raises:
        ModelFileError: Not as many as there are tokens.
    """
    types = gguf.metadata.get("tokenizer.ggml.token_type", ())
    if not isinstance(types, (np.ndarray, tuple)):
        raise ModelFileError(f"{gguf.path}: tokenizer.ggml.token_type is not a list of numbers")
    if len(types) not in (0, len(tokens)):
        raise ModelFileError(f"{gguf.path}: {len(types)} token types for {len(tokens)} tokens")
    return [int(kind) for kind in types]
