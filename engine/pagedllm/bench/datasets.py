"""What a serving benchmark sends: prompts that share nothing, a few prefixes, or the documents of a RAG application."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError

__all__ = ["DATASETS", "Prompt", "Shape", "make_prompts"]

DATASETS = ("random", "prefix_repetition", "rag")

# Documents of a corpus are not equally popular; the exponent is that of words in a text.
_ZIPF_EXPONENT = 1.0


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One request of a benchmark.

    Args:
        content: Text or token ids to continue, or the messages of a chat.
        num_output_tokens: Tokens to generate.
    """

    content: str | tuple[int, ...] | tuple[Mapping[str, Any], ...]
    num_output_tokens: int

    @property
    def is_chat(self) -> bool:
        return isinstance(self.content, tuple) and bool(self.content) and isinstance(self.content[0], Mapping)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Lengths in tokens, and how much is shared.

    Args:
        input_len: Of each prompt of ``random``.
        output_len: Generated for each prompt.
        num_prefixes: Different beginnings of ``prefix_repetition``, equally often.
        prefix_len: Of each.
        suffix_len: Of what follows one, different in each prompt.
        num_documents: Size of the corpus of ``rag``; few documents are popular, as words in a text (Zipf).
        documents_per_prompt: How many of them stand in a prompt, in the corpus' order.
        document_len: Of each.
        instruction_len: Of what stands before the documents, the same in all prompts.
        question_len: Of what stands after them.
    """

    input_len: int = 128
    output_len: int = 64
    num_prefixes: int = 10
    prefix_len: int = 256
    suffix_len: int = 64
    num_documents: int = 40
    documents_per_prompt: int = 4
    document_len: int = 128
    instruction_len: int = 48
    question_len: int = 24


def make_prompts(dataset: str, num_prompts: int, shape: Shape, *, vocab_size: int, seed: int) -> list[Prompt]:
    """Draw the prompts of a dataset, or read them from a file.

    Args:
        dataset: One of ``DATASETS``, or the path of a JSON Lines file: an object a line with ``prompt`` or
            ``messages`` and, if it is not to be ``output_len``, ``max_tokens``. Its lines are repeated as needed.
        vocab_size: Of the model; token ids are drawn from its middle, since special tokens stand at the ends.

    Raises:
        ConfigError: There is no such dataset, or its file is not such.
    """
    rng = np.random.default_rng(seed)

    def draw(num_tokens: int) -> tuple[int, ...]:
        return tuple(rng.integers(vocab_size // 10, vocab_size - vocab_size // 10, num_tokens).tolist())

    if dataset == "random":
        contents: list[Any] = [draw(shape.input_len) for _ in range(num_prompts)]
    elif dataset == "prefix_repetition":
        prefixes = [draw(shape.prefix_len) for _ in range(shape.num_prefixes)]
        order = rng.permutation(np.arange(num_prompts) % shape.num_prefixes)
        contents = [prefixes[index] + draw(shape.suffix_len) for index in order]
    elif dataset == "rag":
        contents = _rag_prompts(num_prompts, shape, rng, draw)
    elif dataset.endswith(".jsonl"):
        return _read_prompts(Path(dataset), num_prompts, shape.output_len)
    else:
        raise ConfigError.for_value("dataset", dataset, f"must be {', '.join(DATASETS)} or a file *.jsonl")
    return [Prompt(content=content, num_output_tokens=shape.output_len) for content in contents]


def _rag_prompts(num_prompts: int, shape: Shape, rng: np.random.Generator, draw: Any) -> list[tuple[int, ...]]:
    if shape.documents_per_prompt > shape.num_documents:
        raise ConfigError.for_value(
            "documents_per_prompt", shape.documents_per_prompt, f"must be at most num_documents={shape.num_documents}"
        )
    instruction = draw(shape.instruction_len)
    corpus = [draw(shape.document_len) for _ in range(shape.num_documents)]
    weights = 1.0 / np.arange(1, shape.num_documents + 1) ** _ZIPF_EXPONENT
    weights /= weights.sum()
    prompts = []
    for _ in range(num_prompts):
        chosen = rng.choice(shape.num_documents, shape.documents_per_prompt, replace=False, p=weights)
        documents = [corpus[index] for index in sorted(chosen)]
        prompts.append(sum(documents, instruction) + draw(shape.question_len))
    return prompts


def _read_prompts(path: Path, num_prompts: int, output_len: int) -> list[Prompt]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dataset: cannot read {path}: {error}") from error
    prompts = [_read_prompt(path, number, line, output_len) for number, line in enumerate(lines, 1)]
    if not prompts:
        raise ConfigError(f"dataset: {path} has no prompts")
    return [prompts[index % len(prompts)] for index in range(num_prompts)]


def _read_prompt(path: Path, number: int, line: str, output_len: int) -> Prompt:
    where = f"dataset: line {number} of {path}"
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict) or not set(row) <= {"prompt", "messages", "max_tokens"}:
        raise ConfigError(f"{where} must be an object of prompt or messages, and max_tokens")
    prompt, messages, max_tokens = row.get("prompt"), row.get("messages"), row.get("max_tokens", output_len)
    if (prompt is None) == (messages is None):
        raise ConfigError(f"{where} must have one of prompt and messages")
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise ConfigError(f"{where}: max_tokens must be a whole number of at least 1")
    if messages is not None:
        if not _is_list_of(messages, dict):
            raise ConfigError(f"{where}: messages must be a list of objects")
        return Prompt(content=tuple(messages), num_output_tokens=max_tokens)
    if not (isinstance(prompt, str) and prompt) and not _is_list_of(prompt, int):
        raise ConfigError(f"{where}: prompt must be a text or a list of token ids")
    content: Any = prompt if isinstance(prompt, str) else tuple(prompt or ())
    return Prompt(content=content, num_output_tokens=max_tokens)


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, kind) for item in value)
