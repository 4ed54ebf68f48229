"""Grammars in a step: what they allow goes to the logits, what was sampled goes back to them."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .compute.bitmask import apply_bitmask
from .control.sequence import Sequence
from .text.grammar import GrammarError, Matcher, fill_bitmask, new_executor

if TYPE_CHECKING:
    import llguidance

__all__ = ["Constraints"]


class Constraints:
    """Holds the sequences of a batch that have a grammar to it. Not thread-safe: the engine's thread owns it.

    A matcher takes each token right after it was sampled, so preemption and resuming do not touch it.
    """

    def __init__(self) -> None:
        self._executor: llguidance.LLExecutor | None = None
        self._failures: dict[str, str] = {}

    def mask(self, logits: Tensor, matchers: List[Matcher | None]) -> Tensor:
        """The logits with what the grammars ban at -inf; rows without a grammar as they are.

        Args:
            logits: [len(matchers), vocab_size] float32; not changed.
            matchers: One for each row.
        """
        rows = [row for row, matcher in enumerate(matchers) if matcher is not None]
        if not rows:
            return logits
        if self._executor is None:
            self._executor = new_executor()
        bitmask = fill_bitmask([matcher for matcher in matchers if matcher is not None], self._executor)
        return apply_bitmask(logits, torch.from_numpy(bitmask).to(logits.device), rows)

    def advance(self, sequences: List[Sequence], matchers: List[Matcher | None]) -> None:
        """Take the tokens that were just sampled, and end the texts that nothing may follow."""
        for sequence, matcher in zip(sequences, matchers, strict=True):
            if matcher is None:
                continue
            try:
                matcher.check()
                if not sequence.ended_on_token:
                    matcher.accept(sequence.token_ids[-1])
            except GrammarError as error:
                self._failures[sequence.request_id] = str(error)
            else:
                if matcher.is_complete and not sequence.ended_on_token:
                    sequence.finish("stop")

    def take_failures(self) -> dict[str, str]:
        """Requests whose grammar has given up since the last call, with the reasons."""
        failures, self._failures = self._failures, {}
        return failures
