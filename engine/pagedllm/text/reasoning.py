"""Thoughts that a model writes before its answer, between tags."""

from __future__ import annotations

import enum

__all__ = ["CLOSE_TAG", "OPEN_TAG", "Thinking", "ThoughtSplitter", "num_undecided"]

OPEN_TAG, CLOSE_TAG = "<think>", "</think>"


class Thinking(enum.Enum):
    """How an answer begins."""

    NONE = "none"
    """Without thoughts."""
    POSSIBLE = "possible"
    """With thoughts, if the first thing in it is their opening tag."""
    BEGUN = "begun"
    """With thoughts: the prompt has opened them."""


class ThoughtSplitter:
    """Parts an answer's text into thoughts and the rest, as it comes.

    White space beside the tags belongs to neither. An answer that is cut within its thoughts is thoughts only.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._state = thinking
        # Only beside the tags is white space dropped.
        self._is_at_start = thinking is not Thinking.NONE
        self._held = ""

    @property
    def is_thinking(self) -> bool:
        """Whether thoughts have begun and not ended."""
        return self._state is Thinking.BEGUN

    def append(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """Take the next piece; returns what is new of the thoughts and of the rest."""
        if self._state is Thinking.NONE:
            return "", self._without_space(text)
        self._held += text
        if self._state is Thinking.POSSIBLE:
            begun = self._held.lstrip()
            if begun.startswith(OPEN_TAG):
                self._state, self._held = Thinking.BEGUN, begun[len(OPEN_TAG) :]
            elif is_last or not OPEN_TAG.startswith(begun):
                return "", self._give_up()
            else:
                return "", ""
        if self._is_at_start:
            self._held = self._held.lstrip()
            self._is_at_start = not self._held
        before, tag, after = self._held.partition(CLOSE_TAG)
        if tag:
            self._state, self._held, self._is_at_start = Thinking.NONE, "", True
            return before.rstrip(), self._without_space(after)
        keep = 0 if is_last else num_undecided(self._held, CLOSE_TAG)
        cut = len(self._held) - keep
        thoughts, self._held = self._held[:cut], self._held[cut:]
        return (thoughts.rstrip() if is_last else thoughts), ""

    def _give_up(self) -> str:
        """There are no thoughts: what was held back is the answer's, white space and all."""
        text, self._held = self._held, ""
        self._state, self._is_at_start = Thinking.NONE, False
        return text

    def _without_space(self, text: str) -> str:
        """Without the white space between thoughts and answer."""
        if self._is_at_start:
            text = text.lstrip()
            self._is_at_start = not text
        return text


def num_undecided(text: str, tag: str) -> int:
    """Length of the longest tail of a text that may still become a tag, or the white space before one."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-length:]):
            break
    else:
        length = 0
    rest = text[: len(text) - length]
    return length + len(rest) - len(rest.rstrip())
