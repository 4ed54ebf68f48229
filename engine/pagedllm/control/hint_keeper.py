"""Carries out a request's hints, and notes in its sequence what became of each."""

from __future__ import annotations

from collections import Counter

from ..api import HintOutcome
from .kv_cache_manager import KVCacheManager
from .policies import Policy
from .sequence import Breakpoint, Sequence

__all__ = ["HintKeeper"]


class HintKeeper:
    """Hints change when something is computed and how long it is kept, never what; none of them is ever an error.

    Attributes:
        counts: Outcomes so far, by ``(hint, outcome)``.
    """

    def __init__(self, manager: KVCacheManager, policy: Policy) -> None:
        self._manager = manager
        self._policy = policy
        self.counts: Counter[tuple[str, str]] = Counter()

    def on_arrival(self, sequence: Sequence) -> None:
        """Release pins, and say whether the priority will count."""
        hints, manager = sequence.hints, self._manager
        if sequence.leader is not None:
            return
        if hints.release:
            nodes = manager.match_prefix(sequence.token_ids, sequence.salt)
            self._note(sequence, manager.pins.release(nodes, key=hints.prefix_key, salt=sequence.salt))
        if hints.priority and self._policy.uses_priority:
            self._note(sequence, HintOutcome(hint="priority", outcome="accepted"))
        elif hints.priority:
            reason = f"the scheduling policy is {self._policy.name!r}, which knows no priorities"
            self._note(sequence, HintOutcome(hint="priority", outcome="rejected", reason=reason))

    def on_prompt_computed(self, sequence: Sequence) -> None:
        """Pin up to the breakpoints."""
        if sequence.leader is not None:
            return
        for place in sequence.breakpoints:
            self._note(sequence, self._pin(sequence, place))
        sequence.breakpoints = ()
        if sequence.hints.warm:
            self._note(sequence, self._warmed(sequence))

    def on_end(self, sequence: Sequence) -> None:
        """Say what came to nothing, because the request ended before its prompt was computed."""
        reason = "the request ended before its prompt was computed"
        for _ in sequence.breakpoints:
            self._note(sequence, HintOutcome(hint="retain", outcome="missing", reason=reason))
        sequence.breakpoints = ()
        if sequence.hints.warm and sequence.leader is None and not sequence.is_prompt_computed:
            self._note(sequence, HintOutcome(hint="warm", outcome="missing", reason=reason))

    def _pin(self, sequence: Sequence, place: Breakpoint) -> HintOutcome:
        manager = self._manager
        if not manager.enable_prefix_caching:
            return HintOutcome(hint="retain", outcome="rejected", reason="prefix caching is off")
        num_blocks = min(place.num_tokens, sequence.num_prompt_tokens) // manager.block_size
        nodes = sequence.nodes[:num_blocks]
        if not nodes:
            reason = f"there is no full block of {manager.block_size} tokens in the cache before it"
            return HintOutcome(hint="retain", outcome="missing", reason=reason)
        key = sequence.hints.prefix_key
        outcome = manager.pins.pin(sequence.token_ids, nodes, key=key, salt=sequence.salt, ttl_s=place.ttl_s)
        if outcome.outcome == "accepted" and place.num_tokens > sequence.num_prompt_tokens:
            reason = f"the prompt has only {sequence.num_prompt_tokens} tokens"
            return HintOutcome(hint="retain", outcome="clipped", num_tokens=outcome.num_tokens, reason=reason)
        return outcome

    def _warmed(self, sequence: Sequence) -> HintOutcome:
        manager = self._manager
        if not manager.enable_prefix_caching:
            return HintOutcome(hint="warm", outcome="rejected", reason="prefix caching is off")
        num_tokens = len(sequence.nodes) * manager.block_size
        if num_tokens < sequence.num_prompt_tokens // manager.block_size * manager.block_size:
            reason = "the prefix cache was reset meanwhile"
            return HintOutcome(hint="warm", outcome="clipped", num_tokens=num_tokens, reason=reason)
        return HintOutcome(hint="warm", outcome="accepted", num_tokens=num_tokens)

    def _note(self, sequence: Sequence, outcome: HintOutcome) -> None:
        sequence.outcomes.append(outcome)
        self.counts[(outcome.hint, outcome.outcome)] += 1
