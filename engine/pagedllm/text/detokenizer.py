"""Token ids to text, piece by piece, so that the pieces join to exactly what decoding all at once gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer"]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# The window is cut back to _KEEP tokens when it passes _LIMIT. _KEEP must be at least 4, the bytes of the longest
# character; _LIMIT trades decoding longer windows against cutting more often.
_KEEP = 6
_LIMIT = 14


class IncrementalDetokenizer:
    """Turns one sequence's tokens into text as they come. Not for several threads at once.

    Law: ``"".join(deltas) + flush() == tokenizer.decode(ids)`` for any ids, and a delta holds whole characters only.

    Method: decode a window of the last few tokens and emit what is new in it. Two facts make a window enough:

    - Only the last U+FFFD at the end of a text may still change. A decoder writes one for each longest run of bytes
      that begins a character and does not end it, so an earlier one has been ended by the byte that followed.
    - UTF-8 synchronises itself. A window that begins inside a character decodes to the same text as the whole, but for
      U+FFFD at its beginning, because the bytes that begin a character never occur inside one. What has been emitted
      is therefore counted from the window's end when its beginning is cut off.

    SentencePiece bytes (``<0xE4>``) are different: one bad byte spoils the whole run, so their text waits for its end.

    Args:
        tokenizer: Of the model; special tokens are left out of the text.
        shown: Special tokens that are not left out, with their texts.
    """

    def __init__(self, tokenizer: Tokenizer, shown: Mapping[int, str] | None = None) -> None:
        self._tokenizer = tokenizer
        self._shown = shown or {}
        self._window: list[int] = []
        # Characters of the window's text that have been emitted, or that came before it.
        self._num_emitted = 0

    def append(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens and return the characters that they complete, possibly none."""
        if self._shown and not self._shown.keys().isdisjoint(token_ids):
            return "".join(map(self._append_one, token_ids))
        new = [token_id for token_id in token_ids if self._tokenizer.has_text(token_id)]
        if not new:
            return ""
        self._window += new
        if self._tokenizer.is_byte(new[-1]):
            return ""
        text = self._tokenizer.decode(self._window)
        end = len(text) - text.endswith(_REPLACEMENT)
        delta = text[self._num_emitted : end]
        # Whatever a decoder does with a text's end, what has been emitted stays emitted.
        self._num_emitted = max(self._num_emitted, end)
        if len(self._window) > _LIMIT:
            self._cut_window(num_held=len(text) - self._num_emitted)
        return delta

    def flush(self) -> str:
        """Return what was held back, at the end of the sequence."""
        text = self._tokenizer.decode(self._window)
        rest = text[self._num_emitted :]
        self._num_emitted = len(text)
        return rest

    def _append_one(self, token_id: int) -> str:
        if token_id not in self._shown:
            return self.append([token_id])
        # A text of its own: it ends the one before it.
        text = self.flush() + self._shown[token_id]
        self._window, self._num_emitted = [], 0
        return text

    def _cut_window(self, *, num_held: int) -> None:
        """Keep the window's end; its last ``num_held`` characters are still to be emitted."""
        self._window = self._window[-_KEEP:]
        self._num_emitted = len(self._tokenizer.decode(self._window)) - num_held
        assert self._num_emitted >= 0
