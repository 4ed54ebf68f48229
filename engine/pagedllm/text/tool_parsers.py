"""Tool calls in an answer, parted from its text as it comes."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ..api import ToolCallDelta
from .call_reader import CallReader
from .reasoning import num_undecided
from .tool_syntax import ToolSyntax

__all__ = ["CallSplitter", "SplitText", "call_id"]

_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9


@dataclass(frozen=True, slots=True)
class SplitText:
    """What is new of the text, and of the calls after it."""

    text: str
    tool_calls: tuple[ToolCallDelta, ...] = ()


class CallSplitter:
    """Parts an answer into text and calls.

    The pieces of a call's arguments join to exactly what the model wrote. Nothing is put right: what only begins like
    a call is text, and what is wrong with a call that has begun stays in its arguments. White space between a text
    and a call belongs to neither.

    Args:
        syntax: How the model writes calls.
        names: Of the tools.
        new_id: The id of the call with a number, counted from 0.

    Attributes:
        has_whole_calls: Whether there are calls, and the last one is complete.
    """

    def __init__(self, syntax: ToolSyntax, names: Collection[str], new_id: Callable[[int], str]) -> None:
        self._syntax = syntax
        self._names = names
        self._new_id = new_id
        self._num_calls = 0
        self._held = ""
        self._reader: CallReader | None = None
        self._state = self._in_text if syntax.open_tag else self._before_bare_call
        self._text = ""
        self._calls: list[ToolCallDelta] = []
        self.has_whole_calls = False

    def append(self, text: str, *, is_last: bool) -> SplitText:
        """Take the next piece; with ``is_last`` everything held back is given out."""
        self._text, self._calls = "", []
        self._held += text
        while self._held and self._state():
            pass
        if is_last:
            self._finish()
        return SplitText(self._text, tuple(self._calls))

    # Each state takes from what is held, and returns whether another may go on with the rest.

    def _in_text(self) -> bool:
        before, tag, after = self._held.partition(self._syntax.open_tag)
        if tag:
            self._say(before.rstrip())
            self._held = after
            self._open_call()
            return True
        cut = len(self._held) - num_undecided(self._held, self._syntax.open_tag)
        self._say(self._held[:cut])
        self._held = self._held[cut:]
        return False

    def _before_bare_call(self) -> bool:
        """Where an answer without tags may go on with a call."""
        begun = self._held.lstrip(" \t\r\n;") if self._num_calls else self._held.lstrip()
        if not begun:
            return False
        if self._num_calls:
            self._held = begun
        if begun.startswith("{"):
            self._open_call()
            return True
        self._state = self._in_plain_text
        return True

    def _in_plain_text(self) -> bool:
        self._say(self._held)
        self._held = ""
        return False

    def _in_call(self) -> bool:
        assert self._reader is not None
        piece = self._reader.append(self._held)
        self._held = piece.rest
        if piece.name is not None:
            self.has_whole_calls = False
            self._calls.append(ToolCallDelta(index=self._num_calls, id=self._new_id(self._num_calls), name=piece.name))
            self._num_calls += 1
        self._argue(piece.arguments)
        if self._reader.is_done:
            self.has_whole_calls = True
            self._state = self._after_call
        elif self._reader.is_broken and self._reader.has_begun:
            self._state = self._in_broken_call
        elif self._reader.is_broken:
            self._take_back()
        return bool(self._held)

    def _after_call(self) -> bool:
        """Between a call's object and what ends the call."""
        tag = self._syntax.close_tag
        rest = self._held.lstrip()
        if tag and rest.startswith(tag):
            self._held = rest[len(tag) :].lstrip()
            self._state = self._after_tag
            return True
        if not tag:
            self._state = self._before_bare_call
            return True
        if tag.startswith(rest):
            return False
        self.has_whole_calls = False
        self._state = self._in_broken_call
        return True

    def _after_tag(self) -> bool:
        self._held = self._held.lstrip()
        if self._held:
            self._state = self._in_text
        return bool(self._held)

    def _in_broken_call(self) -> bool:
        tag = self._syntax.close_tag
        before, found, after = self._held.partition(tag) if tag else (self._held, "", "")
        if found:
            self._argue(before)
            self._held, self._state = after, self._after_tag
            return True
        cut = len(before) - (num_undecided(before, tag) if tag else 0)
        self._argue(before[:cut])
        self._held = before[cut:]
        return False

    def _open_call(self) -> None:
        has_tag = bool(self._syntax.open_tag)
        self._reader = CallReader(
            (lambda _: True) if has_tag else self._names.__contains__, needs_arguments=not has_tag
        )
        self._state = self._in_call

    def _take_back(self) -> None:
        """What was read is text after all."""
        assert self._reader is not None
        self._say(self._syntax.open_tag + self._reader.raw)
        self._reader = None
        self._state = self._in_text if self._syntax.open_tag else self._in_plain_text

    def _finish(self) -> None:
        """At the end of the answer, give out what is held."""
        if self._reader is not None and self._state == self._in_call and not self._reader.has_begun:
            self._take_back()
        if self._state in (self._after_call, self._after_tag) or (
            self._state == self._before_bare_call and self._num_calls
        ):
            pass  # a part of the closing tag, or white space
        elif self._state == self._in_broken_call:
            self._argue(self._held)
        else:
            self._say(self._held)
        self._held = ""

    def _say(self, text: str) -> None:
        self._text += text

    def _argue(self, arguments: str) -> None:
        if arguments:
            self._calls.append(ToolCallDelta(index=self._num_calls - 1, arguments=arguments))


def call_id(*parts: object) -> str:
    """Nine letters and digits, as Mistral's templates want them, that depend on nothing but the parts."""
    number = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest(), "big")
    letters = ""
    for _ in range(_ID_LENGTH):
        number, place = divmod(number, len(_ID_LETTERS))
        letters += _ID_LETTERS[place]
    return letters
