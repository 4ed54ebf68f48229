"""How much of a long prompt fits into a step beside sequences that decode, by measured times."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass, field

from .sequence import Sequence

__all__ = ["StepCost"]

# Weight of the newest measurement: a step's time wanders, and a prompt's tokens cost more the further it gets.
_NEWEST = 0.3
_MAX_JUMP = 1.5
# What to begin with, and the least: a prompt must get on.
_MIN_TOKENS = 16


@dataclass
class StepCost:
    """Keeps the time of a step with prompts to a multiple of that of one without.

    Args:
        max_stretch: That multiple.
        long_prompt: Prompts with more tokens to compute than this are held back; others are computed as they come.
    """

    max_stretch: float
    long_prompt: int
    _decode_s: dict[int, float] = field(default_factory=dict)
    _token_s: float | None = None
    _left: int | None = None

    def begin_step(self) -> None:
        """Nothing has been taken of the next step."""
        self._left = None

    @property
    def is_spent(self) -> bool:
        """Whether this step computes nothing more of long prompts."""
        return self._left == 0

    def is_long(self, num_tokens: int) -> bool:
        """Whether a prompt with so many tokens to compute is held back."""
        return num_tokens > self.long_prompt

    def take(self, num_tokens: int, running: List[Sequence], most: int) -> int:
        """How many of a long prompt's next tokens this step computes; up to ``most`` if none that runs decodes."""
        if self._left is None:
            num_decoding = sum(item.num_uncomputed_tokens == 1 for item in running)
            self._left = self.max_prompt_tokens(num_decoding) if num_decoding else most
        taken = min(num_tokens, self._left)
        self._left -= taken
        return taken

    def max_prompt_tokens(self, num_decoding: int) -> int:
        """Tokens of long prompts for a step in which so many sequences decode."""
        decode_s = self._decode_time(num_decoding)
        if decode_s is None or not self._token_s:
            return _MIN_TOKENS
        return max(int((self.max_stretch - 1) * decode_s / self._token_s), _MIN_TOKENS)

    def observe(self, num_decode_tokens: int, num_prompt_tokens: int, duration_s: float) -> None:
        """Learn from a step."""
        if not num_prompt_tokens:
            size = num_decode_tokens.bit_length()
            self._decode_s[size] = _smooth(self._decode_s.get(size), duration_s)
            return
        alone_s = self._decode_time(num_decode_tokens) or 0.0 if num_decode_tokens else 0.0
        self._token_s = _smooth(self._token_s, max(duration_s - alone_s, 0.0) / num_prompt_tokens)

    def _decode_time(self, num_decoding: int) -> float | None:
        """Of the batch size, by powers of two, that is nearest among those seen; the smaller in doubt."""
        size = num_decoding.bit_length()
        nearest = min(self._decode_s, key=lambda seen: (abs(seen - size), seen), default=None)
        return None if nearest is None else self._decode_s[nearest]


def _smooth(known: float | None, new: float) -> float:
    """Follow the measurements, but not one that something else has stretched."""
    return new if known is None else known + _NEWEST * (min(new, _MAX_JUMP * known) - known)
