"""Control tokens: written by a chat template they act, written in a message they are text like any other.

A template puts messages and control tokens into one text, and a tokenizer cannot tell who wrote a ``<|im_end|>`` in it.
So the chat is rendered a second time with marks in place of the control strings in messages. Whatever the template does
with a message (trim it, split it), what it wrote itself can then be told from what it was given: it is spelled with
aliases that only a second tokenizer knows, and the control strings in messages are put back for their marks. Nothing
else about the text changes, so it is cut into tokens as ever.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence

import tokenizers

from ..api import Message, Tool
from ..errors import InvalidRequestError
from .tool_messages import map_call_texts, map_tool_texts

__all__ = ["ControlTokens"]

# Private-use characters: no white space, no case, in no token and practically no text. What must not be guessed has a
# random number besides.
_OPEN, _CLOSE = "\U000f0001", "\U000f0002"
_BRACKETED = re.compile(r"[<\[].+[>\]]")


class ControlTokens:
    """The control tokens of a model. Safe from many threads at once.

    Args:
        backend: The model's tokenizer; not changed.
        template_texts: What the chat template writes around some chats. Some models do not declare their turn markers
            special; those found here in brackets count as control tokens too.
    """

    def __init__(self, backend: tokenizers.Tokenizer, template_texts: Iterable[str] = ()) -> None:
        self._backend = backend
        texts = list(template_texts)
        self._ids = {
            token.content: token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.content and (token.special or _is_turn_marker(token.content, texts))
        }
        self._tokens = [backend.get_added_tokens_decoder()[token_id] for token_id in self._ids.values()]
        # The longest first, as the tokenizer matches them.
        alternatives = "|".join(map(re.escape, sorted(self._ids, key=len, reverse=True))) or r"(?!)"
        self._exact = re.compile(alternatives)
        # Of messages also what a template that changes case would make a control token of.
        self._any_case = re.compile(alternatives, re.IGNORECASE)
        self._heads = {token[:end] for token in self._ids for end in range(1, len(token))}
        self._tails = {token[start:] for token in self._ids for start in range(1, len(token))}
        self._max_length = max(map(len, self._ids), default=1)
        # Where tokens are looked for in normalised text, what becomes one need not look like one.
        is_normalized = any(token.normalized for token in self._tokens)
        self._normalizer = backend.normalizer if is_normalized else None
        self._nonce = secrets.randbits(64)
        self._aliases = {content: f"{_OPEN}{self._nonce}.{number}{_CLOSE}" for number, content in enumerate(self._ids)}
        self._literal: tokenizers.Tokenizer | None = None
        self._ids_of_aliases: dict[int, int] = {}
        self._building = threading.Lock()

    def may_be_in(self, text: str) -> bool:
        """Whether a text must not be encoded as it is, if its control strings are to be text."""
        if not self._ids:
            return False
        if self._normalizer and self._any_case.search(self._normalizer.normalize_str(text)):
            return True
        return bool(self._find(text))

    def may_be_in_chat(self, messages: Iterable[Message], tools: Iterable[Tool] = ()) -> bool:
        """The same of the texts of a chat's messages and tools."""
        texts = [text for message in messages for text in _texts(message)]
        texts += [text for tool in tools for text in _tool_texts(tool)]
        return any(map(self.may_be_in, texts))

    def encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text in which control strings are text.

        Raises:
            InvalidRequestError: The tokenizer makes a control token of it all the same.
        """
        encoding = self._get_literal().encode(text, add_special_tokens=add_special_tokens)
        written = [
            token_id
            for token_id, is_added in zip(encoding.ids, encoding.special_tokens_mask, strict=True)
            if not is_added
        ]
        self._check_is_plain(written)
        ids: list[int] = encoding.ids
        return ids

    def encode_chat(
        self,
        messages: Sequence[Message],
        render: Callable[[Sequence[Message], Sequence[Tool]], str],
        tools: Sequence[Tool] = (),
    ) -> list[int]:
        """Token ids of a chat in whose messages and tools control strings are text.

        Args:
            messages: The chat.
            render: Renders it; the same text for the same messages and tools.
            tools: What it says may be called.

        Raises:
            InvalidRequestError: From ``render``; or it cannot be told which control tokens are the template's.
        """
        marks = _Marks()
        marked = render(
            [self._marked(message, marks) for message in messages], [self._marked_tool(tool, marks) for tool in tools]
        )
        if marks.restore(marked) != render(messages, tools):
            raise InvalidRequestError(
                "a message has control tokens in its text, and the chat template changes them: they cannot be told "
                "from the template's own. Remove them, or set parse_special_tokens=True if they are meant to act",
                param="parse_special_tokens",
            )
        aliased, num_aliases = self._exact.subn(lambda match: self._aliases[match[0]], marked)
        text = marks.restore(aliased)
        written: list[int] = self._get_literal().encode(text, add_special_tokens=False).ids
        self._check_is_plain(written)
        ids = [self._ids_of_aliases.get(token_id, token_id) for token_id in written]
        if sum(token_id in self._ids_of_aliases for token_id in written) != num_aliases:
            raise InvalidRequestError(
                "control tokens of the chat template touch the text of a message such that they are no control tokens",
                param="messages",
            )
        return ids

    def _marked(self, message: Message, marks: _Marks) -> Message:
        names = [("role", message.role), ("tool_call_id", message.tool_call_id or "")]
        names += [("tool_calls.id", call.id) for call in message.tool_calls]
        for field, name in names:
            if self._any_case.search(name):
                raise InvalidRequestError.for_value(f"messages.{field}", name, "must not have a control token in it")

        def mark(text: str) -> str:
            return self._mark(text, marks)

        return Message(
            role=message.role,
            content=mark(message.content),
            tool_calls=[map_call_texts(call, mark) for call in message.tool_calls],
            tool_call_id=message.tool_call_id,
        )

    def _marked_tool(self, tool: Tool, marks: _Marks) -> Tool:
        if self._any_case.search(tool.name):
            raise InvalidRequestError.for_value("tools.name", tool.name, "must not have a control token in it")
        return map_tool_texts(tool, lambda text: self._mark(text, marks))

    def _mark(self, text: str, marks: _Marks) -> str:
        pieces, position = [], 0
        for start, end in self._find(text):
            pieces += [text[position:start], marks.add(text[start:end])]
            position = end
        return "".join([*pieces, text[position:]])

    def _find(self, text: str) -> list[tuple[int, int]]:
        """Where a text has control strings, or has the beginning of one at its end or the end of one at its beginning.

        Two messages with nothing between them could make a whole of such halves.
        """
        spans = [match.span() for match in self._any_case.finditer(text)]
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        for length in range(min(self._max_length - 1, end - start), 0, -1):
            if text[start : start + length] in self._tails:
                spans.append((start, start + length))
            if text[end - length : end] in self._heads:
                spans.append((end - length, end))
        return _united(spans)

    def _check_is_plain(self, ids: Iterable[int]) -> None:
        # <unk> stands for what the vocabulary lacks.
        model = self._backend.model
        unknown = getattr(model, "unk_token", None)
        allowed = {getattr(model, "unk_id", None), None if unknown is None else self._backend.token_to_id(unknown)}
        forged = set(ids).intersection(self._ids.values()) - allowed
        if forged:
            token = self._backend.id_to_token(min(forged))
            raise InvalidRequestError(
                f"the text {token!r} cannot be told from the control token by this model's tokenizer; remove it",
                param="parse_special_tokens",
            )

    def _get_literal(self) -> tokenizers.Tokenizer:
        """The second tokenizer, built when first needed: it takes the memory of the vocabulary once more."""
        with self._building:
            if self._literal is None:
                self._literal = self._build_literal()
            return self._literal

    def _build_literal(self) -> tokenizers.Tokenizer:
        literal = tokenizers.Tokenizer.from_str(self._backend.to_str())
        # Those that the model does not declare special: in the copy they are, so that they are left alone like them.
        literal.add_special_tokens([_copy(token, token.content, special=True) for token in self._tokens])
        literal.encode_special_tokens = True
        # Not special, or they would be left alone as well.
        literal.add_tokens([_copy(token, self._aliases[token.content], special=False) for token in self._tokens])
        contents = {alias: content for content, alias in self._aliases.items()}
        for alias_id, token in literal.get_added_tokens_decoder().items():
            if token.content in contents:
                self._ids_of_aliases[alias_id] = self._ids[contents[token.content]]
        return literal


class _Marks:
    """What stands for control strings while a chat is rendered."""

    def __init__(self) -> None:
        # A message cannot have a number in it that is drawn after it was written.
        self._nonce = secrets.randbits(64)
        self._originals: dict[str, str] = {}
        self._pattern = re.compile(f"{_OPEN}{self._nonce}{_OPEN}[0-9]+{_CLOSE}")

    def add(self, original: str) -> str:
        mark = f"{_OPEN}{self._nonce}{_OPEN}{len(self._originals)}{_CLOSE}"
        self._originals[mark] = original
        return mark

    def restore(self, text: str) -> str:
        return self._pattern.sub(lambda match: self._originals.get(match[0], match[0]), text)


def _texts(message: Message) -> list[str]:
    """Every text of a message that a chat template can write."""
    texts = [message.role, message.content, message.tool_call_id or ""]

    def note(text: str) -> str:
        texts.append(text)
        return text

    for call in message.tool_calls:
        texts.append(call.id)
        map_call_texts(call, note)
    return texts


def _tool_texts(tool: Tool) -> list[str]:
    """Every text of a tool that a chat template can write."""
    texts = [tool.name]

    def note(text: str) -> str:
        texts.append(text)
        return text

    map_tool_texts(tool, note)
    return texts


def _is_turn_marker(content: str, template_texts: Sequence[str]) -> bool:
    # Brackets, because models have words and line breaks among their added tokens.
    return bool(_BRACKETED.fullmatch(content)) and any(content in text for text in template_texts)


def _united(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """In order, those that overlap as one."""
    united: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if united and start < united[-1][1]:
            united[-1] = (united[-1][0], max(end, united[-1][1]))
        else:
            united.append((start, end))
    return united


def _copy(token: tokenizers.AddedToken, content: str, *, special: bool) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=special,
    )
