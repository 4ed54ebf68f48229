"""Grammars in a step: what they allow decides what is sampled, and what was sampled goes back to them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as List
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .compute.bitmask import apply_bitmask
from .compute.sampler import Sampler, is_filtered
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

    def sample(
        self, sampler: Sampler, logits: Tensor, sequences: List[Sequence], matchers: List[Matcher | None]
    ) -> list[int]:
        """Choose each row's next token among those that its grammar allows.

        A mask walks through the vocabulary, and most tokens of a model that was told the form are allowed anyway. So a
        row whose token is the best of all, with or without noise, goes without: if the best is allowed, it is the
        best of the allowed ones too. Where filters look at the whole distribution (top-k, top-p, min-p) that does not
        hold. (A mask may leave out a token that reaches past a lazy rule's end; here it may come, as its parts may.)

        Args:
            sampler: Whose choice for a row must not depend on other rows.
            logits: [len(sequences), vocab_size] float32; not changed.
            sequences: The rows' owners.
            matchers: One for each row; None where any token may come.
        """
        held = {row: matcher for row, matcher in enumerate(matchers) if matcher is not None}
        filtered = {row: matcher for row, matcher in held.items() if is_filtered(sequences[row])}
        token_ids = sampler(self._mask(logits, filtered), sequences)
        refused = [row for row in held if row not in filtered and not held[row].allows(token_ids[row])]
        if refused:
            masked = self._mask(logits[refused], {i: held[row] for i, row in enumerate(refused)})
            allowed = sampler(masked, [sequences[row] for row in refused])
            for row, token_id in zip(refused, allowed, strict=True):
                token_ids[row] = token_id
        return token_ids

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

    def _mask(self, logits: Tensor, matchers: Mapping[int, Matcher]) -> Tensor:
        """The logits with what the grammars of some rows ban at -inf; all others as they are."""
        if not matchers:
            return logits
        if self._executor is None:
            self._executor = new_executor()
        bitmask = fill_bitmask(list(matchers.values()), self._executor)
        return apply_bitmask(logits, torch.from_numpy(bitmask).to(logits.device), list(matchers))

    def take_failures(self) -> dict[str, str]:
        """Requests whose grammar has given up since the last call, with the reasons."""
        failures, self._failures = self._failures, {}
        return failures
