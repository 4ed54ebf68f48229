"""What can be told about a model without loading it: no torch, no transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelFileError
from .gguf_metadata import GGUFFile, read_gguf
from .json_file import read_json_object
from .locate import ModelFiles

__all__ = ["GenerationDefaults", "ModelDescription", "describe_model", "read_eos_token_ids", "read_generation_defaults"]

# A GGUF file names these apart: end of sequence, of turn, of message.
_GGUF_EOS_KEYS = ("eos", "eot", "eom")


@dataclass(frozen=True)
class ModelDescription:
    """A model in a few words.

    Args:
        name: As the user gave it.
        architecture: Such as ``"llama"``.
        max_model_len: Longest sequence that the model was made for, in tokens.
        has_chat_template: Whether it can be used with chat messages.
    """

    name: str
    architecture: str
    max_model_len: int
    has_chat_template: bool


@dataclass(frozen=True)
class GenerationDefaults:
    """What the model's makers recommend; None where they do not say.

    Args:
        eos_token_ids: Ids that end the text, in ascending order.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    eos_token_ids: tuple[int, ...] = ()


def describe_model(files: ModelFiles) -> ModelDescription:
    """Describe a model from its metadata; takes some 0.1 s for a GGUF file with 49k tokens.

    Raises:
        ModelFileError: Damaged or incomplete metadata.
    """
    if files.kind == "gguf":
        gguf = read_gguf(files.path)
        architecture = gguf.architecture
        max_model_len = gguf.metadata.get(f"{architecture}.context_length")
        has_chat_template = "tokenizer.chat_template" in gguf.metadata
    else:
        config = read_json_object(files.path / "config.json")
        architecture = config.get("model_type", "")
        max_model_len = config.get("max_position_embeddings")
        has_chat_template = _has_chat_template(files.path)
    if not isinstance(architecture, str) or not architecture:
        raise ModelFileError(f"{files.path}: the architecture is not given")
    if not isinstance(max_model_len, int) or max_model_len < 1:
        raise ModelFileError(f"{files.path}: the context length is {max_model_len!r}; a positive number is expected")
    return ModelDescription(files.name, architecture, max_model_len, has_chat_template)


def read_generation_defaults(files: ModelFiles) -> GenerationDefaults:
    """Read the recommended sampling parameters: ``generation_config.json`` of a folder; a GGUF file has none.

    Raises:
        ModelFileError: A value that is not a number in its range.
    """
    if files.kind == "gguf":
        return GenerationDefaults(eos_token_ids=read_eos_token_ids(files))
    path = files.path / "generation_config.json"
    options = read_json_object(path, required=False)
    temperature = _number(path, options, "temperature", lambda x: x >= 0)
    top_p = _number(path, options, "top_p", lambda x: 0 < x <= 1)
    top_k = _number(path, options, "top_k", lambda x: x >= -1 and x == int(x))
    return GenerationDefaults(
        temperature=temperature,
        top_p=top_p,
        top_k=None if top_k is None else int(top_k),
        eos_token_ids=read_eos_token_ids(files),
    )


def read_eos_token_ids(files: ModelFiles, gguf: GGUFFile | None = None) -> tuple[int, ...]:
    """The ids that end the text according to the model's configuration, ascending.

    A folder's ``config.json`` and ``generation_config.json`` may each name some (chat models often have the end of
    turn only in one of them), so it is their union.

    Args:
        gguf: The file's metadata if it was read already.

    Raises:
        ModelFileError: An id that is not a number.
    """
    ids: set[int] = set()
    if files.kind == "gguf":
        metadata = (gguf or read_gguf(files.path)).metadata
        for kind in _GGUF_EOS_KEYS:
            key = f"tokenizer.ggml.{kind}_token_id"
            ids.update(_token_ids(files.path, key, metadata.get(key)))
    else:
        for name, required in (("config.json", True), ("generation_config.json", False)):
            path = files.path / name
            value = read_json_object(path, required=required).get("eos_token_id")
            ids.update(_token_ids(path, "eos_token_id", value))
    return tuple(sorted(ids))


def _token_ids(path: Path, key: str, value: Any) -> list[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    for item in values:
        if type(item) is not int or item < 0:
            raise ModelFileError(f"{path}: {key} is {value!r}; token ids are expected")
    return values


def _number(path: Path, options: dict[str, Any], key: str, is_allowed: Callable[[float], bool]) -> float | None:
    value = options.get(key)
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value) or not is_allowed(value):
        raise ModelFileError(f"{path}: {key} is {value!r}, which is out of range")
    return float(value)


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    return bool(read_json_object(folder / "tokenizer_config.json", required=False).get("chat_template"))
