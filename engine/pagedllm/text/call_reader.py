"""One tool call, ``{"name": ..., "arguments": ...}``, read character by character while a model writes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["CallPiece", "CallReader"]

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class CallPiece:
    """What is new of a call.

    Args:
        name: When the call begins.
        arguments: As they stand in the text.
        rest: Text after the call's end, or from where it stopped being one.
    """

    name: str | None
    arguments: str
    rest: str


class CallReader:
    """Reads an object of JSON with a name and arguments, in whichever order.

    The arguments are handed out as they come, from when the name is known. Nothing is put right: what is no call is
    ``is_broken``, and what had been taken until then is ``raw``, unless the call had begun.

    Args:
        is_name: Whether a call may have a name; else what is read is no call.
        needs_arguments: Whether a call without arguments is none. Else its arguments are ``{}``.
    """

    def __init__(self, is_name: Callable[[str], bool], *, needs_arguments: bool) -> None:
        self._is_name = is_name
        self._needs_arguments = needs_arguments
        self._state: Callable[[str], bool] = self._before_object
        self.raw = ""
        self.is_done = False
        self.is_broken = False
        self.has_begun = False
        self._key = ""
        self._name: str | None = None
        self._new_name: str | None = None
        self._arguments: str | None = None  # those that wait for the name
        self._token = ""  # the key or the value that is being read
        self._depth = 0
        self._in_text = self._is_escaped = False

    def append(self, text: str) -> CallPiece:
        """Take text, up to the end of the call."""
        self._new_name = None
        taken = 0
        while taken < len(text) and not (self.is_done or self.is_broken):
            # A state that has only found the end of its value leaves the character to the next.
            if self._state(text[taken]) and not self.is_broken:
                self.raw += text[taken]
                taken += 1
        return CallPiece(self._new_name, self._take_arguments(), text[taken:])

    def _take_arguments(self) -> str:
        if not self.has_begun or self._arguments is None:
            return ""
        arguments, self._arguments = self._arguments, ""
        return arguments

    def _break(self) -> bool:
        self.is_broken = True
        return True

    def _before_object(self, char: str) -> bool:
        if char == "{":
            self._state = self._before_key
        elif char not in _SPACE:
            return self._break()
        return True

    def _before_key(self, char: str) -> bool:
        if char == '"':
            self._token, self._state = char, self._in_key
        elif char == "}" and not self._key:
            return self._break()  # empty
        elif char not in _SPACE:
            return self._break()
        return True

    def _in_key(self, char: str) -> bool:
        self._token += char
        if char == '"' and not self._is_escaped:
            try:
                self._key = json.loads(self._token)
            except ValueError:
                return self._break()
            self._state = self._before_colon
        self._is_escaped = char == "\\" and not self._is_escaped
        return True

    def _before_colon(self, char: str) -> bool:
        if char == ":":
            self._state = self._before_value
        elif char not in _SPACE:
            return self._break()
        return True

    def _before_value(self, char: str) -> bool:
        if char in _SPACE:
            return True
        if char in ",}]:":
            return self._break()
        self._token, self._depth, self._in_text, self._is_escaped = "", 0, False, False
        if self._key in _ARGUMENTS:
            if self._arguments is not None:
                return self._break()  # twice
            self._arguments = ""
            self._begin()
        self._state = self._in_value
        return False

    def _in_value(self, char: str) -> bool:
        if not self._in_text and not self._depth and self._token and char in ",}" + _SPACE:
            return self._end_value()  # of a number or a word, which has no end of its own
        self._token += char
        if self._key in _ARGUMENTS:
            self._arguments = (self._arguments or "") + char
        if self._in_text:
            if char == '"' and not self._is_escaped:
                self._in_text = False
                self._end_container()
            self._is_escaped = char == "\\" and not self._is_escaped
        elif char == '"':
            self._in_text = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self._end_container()
        return True

    def _end_container(self) -> None:
        if not self._depth:
            self._end_value()

    def _end_value(self) -> bool:
        self._state = self._after_value
        if self._key == "name":
            try:
                name = json.loads(self._token)
            except ValueError:
                name = None
            if not isinstance(name, str) or not name or self._name is not None or not self._is_name(name):
                return self._break()
            self._name = name
            self._begin()
        return False

    def _after_value(self, char: str) -> bool:
        if char == ",":
            self._state = self._before_key
        elif char == "}":
            if self._arguments is None and not self._needs_arguments:
                self._arguments = "{}"
                self._begin()
            if not self.has_begun:
                return self._break()
            self.is_done = True
        elif char not in _SPACE:
            return self._break()
        return True

    def _begin(self) -> None:
        """The call begins when its name is known and its arguments come."""
        if self._name is not None and self._arguments is not None:
            self.has_begun = True
            self._new_name = self._name
