"""Text to token ids and back, on a ``tokenizers.Tokenizer`` that transformers loads or that GGUF metadata gives."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
import transformers

from ..api import Message, Tool, ToolCall
from ..errors import InvalidRequestError, ModelFileError, UnsupportedModelError
from ..files.description import read_eos_token_ids
from ..files.locate import ModelFiles
from .chat_template import ChatTemplate, read_chat_template
from .control_tokens import ControlTokens
from .gguf_tokenizer import load_gguf_tokenizer
from .tool_syntax import ToolSyntax

__all__ = ["Tokenizer", "load_tokenizer"]

# Model files often name only one of the tokens that end a chat model's text; these end it wherever they exist.
_END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
)
# Chats that show what a template writes between messages.
_USER, _SYSTEM, _ASSISTANT = (Message(role=role, content="x") for role in ("user", "system", "assistant"))
_TOOL_CHAT = (
    _USER,
    Message(role="assistant", tool_calls=[ToolCall(id="x" * 9, name="x", arguments="{}")]),
    Message(role="tool", content="x", tool_call_id="x" * 9),
)
_SAMPLE_CHATS = ((_USER,), (_SYSTEM, _USER), (_USER, _ASSISTANT, _USER), _TOOL_CHAT)
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class Tokenizer:
    """Encodes and decodes; safe from many threads at once, because nothing in it changes after it is built.

    Attributes:
        vocab_size: One more than the highest token id, added tokens included.
        eos_token_ids: Every id that ends the text.
        chat_template: Jinja source, or None.
        bos_token: Text of the token that begins a sequence; empty if there is none.
        eos_token: Text of the token that ends one; empty if there is none.

    Args:
        backend: Owned from now on.
        template_variables: What the operator tells the chat template.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: frozenset[int],
        chat_template: str | None,
        bos_token: str,
        eos_token: str,
        template_variables: Mapping[str, Any] | None = None,
    ) -> None:
        # A tokenizer.json may come with the truncation and padding of some training run.
        backend.no_truncation()
        backend.no_padding()
        vocab = backend.get_vocab(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # Only SentencePiece vocabularies spell bytes like this; elsewhere it would be a text like any other.
        self._byte_ids = frozenset(token_id for token, token_id in vocab.items() if _BYTE_TOKEN.fullmatch(token))
        if len(self._byte_ids) != 256:
            self._byte_ids = frozenset()
        self.vocab_size: int = max(vocab.values(), default=-1) + 1
        self.chat_template = chat_template
        self.bos_token = bos_token
        self.eos_token = eos_token
        if chat_template is not None:
            ids = (backend.token_to_id(token) for token in _END_TOKENS)
            eos_token_ids |= {token_id for token_id in ids if token_id in self._special_ids}
        self.eos_token_ids = eos_token_ids
        self._template = ChatTemplate(
            source=chat_template, bos_token=bos_token, eos_token=eos_token, variables=dict(template_variables or {})
        )
        self._control_tokens = ControlTokens(backend, _sample_texts(self._template))

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: Any text; may be empty.
            add_special_tokens: Add those that the model wants around a text, such as BOS. Many want none.
            parse_special_tokens: Control tokens written in the text become their ids; else they stay plain text.

        Raises:
            InvalidRequestError: The text has a lone surrogate, which is no character and has no UTF-8.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text is not valid Unicode: a lone surrogate at position {error.start}", param="prompt"
            ) from error
        if not parse_special_tokens and self._control_tokens.may_be_in(text):
            return self._control_tokens.encode_text(text, add_special_tokens=add_special_tokens)
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids, with no clean-up of spaces. Bytes that are no UTF-8 become U+FFFD.

        Args:
            ids: In ``[0, 2**32)``; those the vocabulary lacks (padding rows of an embedding) have no text.
            skip_special_tokens: Leave out control tokens.
        """
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        parse_special_tokens: bool = False,
    ) -> list[int]:
        """Token ids of a chat, rendered by the model's chat template; nothing is added around it.

        Args:
            messages: The chat, oldest first.
            tools: What the model is told that it may call.
            add_generation_prompt: End with the opening of an assistant's turn.
            continue_final_message: End with the exact text of the last message, its turn left open.
            parse_special_tokens: Control tokens written in messages become their ids; else they stay plain text.

        Raises:
            InvalidRequestError: No template, the template refuses the messages, or it cannot be told which control
                tokens are its own.
        """
        # The same for each rendering of this chat.
        now = datetime.now()

        def render(chat: Sequence[Message], tools: Sequence[Tool]) -> str:
            return self._template.render(
                chat,
                tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                now=now,
            )

        if not parse_special_tokens and self._control_tokens.may_be_in_chat(messages, tools):
            return self._control_tokens.encode_chat(messages, render, tools)
        return self.encode(render(messages, tools), add_special_tokens=False)

    def has_text(self, token_id: int) -> bool:
        """Whether the token takes part in ``decode`` with special tokens skipped."""
        return token_id not in self._special_ids and bool(self._backend.id_to_token(token_id))

    @property
    def tool_syntax(self) -> ToolSyntax | None:
        """How the chat template writes calls; None if that is no way that is known here."""
        return self._template.tool_syntax

    @property
    def shows_thoughts(self) -> bool:
        """Whether the chat template has to do with thoughts in tags."""
        return self._template.shows_thoughts

    def added_token_id(self, text: str) -> int | None:
        """The added token that is exactly this text, special or not."""
        return self._added_ids.get(text)

    def to_json(self) -> str:
        """The tokenizer as a ``tokenizer.json``."""
        text: str = self._backend.to_str()
        return text

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is a SentencePiece byte, whose text depends on the whole run of bytes around it."""
        return token_id in self._byte_ids


def load_tokenizer(
    files: ModelFiles, *, chat_template: str | None = None, template_variables: Mapping[str, Any] | None = None
) -> Tokenizer:
    """Load a model's tokenizer; nothing is downloaded and no code of the model's is run.

    Args:
        files: The model's.
        chat_template: The operator's, used instead of the model's: Jinja, or the path of a file with it.
        template_variables: What the operator tells the chat template.

    Raises:
        UnsupportedModelError: A kind of tokenizer that we do not read, by name.
        ModelFileError: Missing or damaged tokenizer files.
        ConfigError: The operator's template is not there or not Jinja.
    """
    template = None if chat_template is None else read_chat_template(chat_template)
    load = _from_gguf if files.kind == "gguf" else _from_folder
    return load(files, template, template_variables)


def _from_gguf(files: ModelFiles, template: str | None, variables: Mapping[str, Any] | None) -> Tokenizer:
    parts = load_gguf_tokenizer(files.path)
    vocab_size = parts.backend.get_vocab_size(with_added_tokens=True)
    eos_token_ids = frozenset(read_eos_token_ids(files, parts.gguf))
    _check_ids(files.path, eos_token_ids, vocab_size)
    return Tokenizer(
        parts.backend,
        eos_token_ids=eos_token_ids,
        chat_template=parts.chat_template if template is None else template,
        bos_token=parts.bos_token,
        eos_token=parts.eos_token,
        template_variables=variables,
    )


def _from_folder(files: ModelFiles, template: str | None, variables: Mapping[str, Any] | None) -> Tokenizer:
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(
            files.path, local_files_only=True, trust_remote_code=False, use_fast=True
        )
    except Exception as error:  # transformers raises many kinds here, tokenizers plain Exception
        raise ModelFileError(f"{files.path}: the tokenizer cannot be loaded: {error}") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise UnsupportedModelError(
            f"{files.path}: {type(loaded).__name__} has no fast tokenizer; a tokenizer.json is needed"
        )
    eos_token_ids = set(read_eos_token_ids(files))
    if loaded.eos_token_id is not None:
        eos_token_ids.add(loaded.eos_token_id)
    if template is None:
        template = loaded.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return Tokenizer(
        backend,
        eos_token_ids=frozenset(eos_token_ids),
        chat_template=template,
        bos_token=loaded.bos_token or "",
        eos_token=loaded.eos_token or "",
        template_variables=variables,
    )


def _sample_texts(template: ChatTemplate) -> Iterator[str]:
    """What the template writes around chats that it accepts."""
    for chat in _SAMPLE_CHATS:
        try:
            yield template.render(chat, add_generation_prompt=False)
        except InvalidRequestError:
            continue


def _check_ids(path: Path, token_ids: frozenset[int], vocab_size: int) -> None:
    outside = sorted(token_id for token_id in token_ids if token_id >= vocab_size)
    if outside:
        raise ModelFileError(f"{path}: end-of-text ids {outside} are outside the vocabulary of {vocab_size} tokens")
