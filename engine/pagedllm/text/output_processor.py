"""Token ids into text that may be shown: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..api import ToolCallDelta
from .detokenizer import IncrementalDetokenizer
from .tokenizer import Tokenizer

__all__ = ["OutputText", "TextDelta"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text, and the stop string that ended it, if one did.

    Args:
        reasoning: New thoughts, which are no part of the text.
        tool_calls: What is new of calls.
    """

    text: str
    stop: str | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class OutputText:
    """The text of one choice as it grows.

    A tail that may still become a stop string is held back, so that what was handed out never has to be taken back.

    Args:
        tokenizer: Decodes the tokens.
        stop: Strings that end the text; it is cut right before the one that completes first.
        shown: Special tokens that are not left out of it, with their texts.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], shown: Mapping[int, str] | None = None) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, shown)
        self._stop = stop
        self._held = ""

    def append(self, token_ids: Sequence[int], *, is_last: bool, may_stop: bool = True) -> TextDelta:
        """Add tokens; with ``is_last`` everything held back is given out, except a stop string.

        Until ``may_stop``, text is given out at once and takes no part in a stop string.
        """
        self._held += self._detokenizer.append(token_ids)
        if is_last:
            self._held += self._detokenizer.flush()
        if not may_stop:
            text, self._held = self._held, ""
            return TextDelta(text)
        match = self._first_match()
        if match is not None:
            return TextDelta(self._held[: match.start], match.stop)
        keep = 0 if is_last else self._num_undecided()
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return TextDelta(text)

    def _first_match(self) -> _Match | None:
        """The stop string that completes first, which does not depend on how the text was cut into tokens."""
        matches = [_Match(start, stop) for stop in self._stop if (start := self._held.find(stop)) >= 0]
        return min(matches, key=lambda match: (match.start + len(match.stop), match.start), default=None)

    def _num_undecided(self) -> int:
        """Length of the longest tail that is the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0


@dataclass(frozen=True, slots=True)
class _Match:
    start: int
    stop: str
