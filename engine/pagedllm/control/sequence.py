"""One text being generated, as the scheduler sees it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..api import FinishReason, SamplingParams

__all__ = ["Sequence"]


@dataclass(eq=False, kw_only=True)
class Sequence:
    """Tokens, progress and KV blocks of one choice of one request.

    There are no phases: a sequence is ``num_tokens - num_computed_tokens`` tokens behind, and a step computes some of
    them. Prefill, a chunk of it, decode and resuming after preemption are the same thing.

    Args:
        request_id: The request it belongs to.
        token_ids: Prompt and completion; grows by one when a step reaches its end.
        num_prompt_tokens: How many of ``token_ids`` are the prompt.
        max_tokens: Most tokens to generate.
        sampling: The request's parameters with the model's defaults filled in.
        seed: Seed of its sampling noise, drawn once if the request has none, so that a resumed sequence repeats it.
        eos_token_ids: Ids that end the text unless ``sampling.ignore_eos``.
        salt: Separates its cached prefixes from others'.
        index: Which choice of the request it is.
        leader: The request's first choice, whose prompt blocks the others share; None for the first itself.
        block_table: KV blocks in order of position. Append-only while it runs.
        nodes: Prefix-cache nodes of its leading full blocks; it holds a reference on each.
        publishes: Whether its full blocks still go to the prefix cache (not after a reset while it ran).
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    sampling: SamplingParams
    seed: int
    eos_token_ids: frozenset[int]
    salt: str | None = None
    index: int = 0
    leader: Sequence | None = None
    arrival_time: float = field(default_factory=time.monotonic)
    first_scheduled_time: float | None = None
    first_token_time: float | None = None

    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    block_table: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    publishes: bool = True
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_prompt_computed(self) -> bool:
        """Whether the whole prompt's KV is there."""
        return self.num_computed_tokens >= self.num_prompt_tokens

    @property
    def needs_all_prompt_logits(self) -> bool:
        """Whether every prompt token is still to be computed, cached or not, because its logits are asked for."""
        return self.sampling.prompt_logprobs is not None and self.leader is None and self.num_output_tokens == 0

    @property
    def banned_token_ids(self) -> frozenset[int]:
        """Tokens that would end the text too early."""
        if self.num_output_tokens >= self.sampling.min_tokens:
            return frozenset()
        return self.stop_token_ids

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end the text."""
        eos_token_ids = frozenset() if self.sampling.ignore_eos else self.eos_token_ids
        return eos_token_ids.union(self.sampling.stop_token_ids)

    @property
    def max_num_tokens(self) -> int:
        """Length at which it ends whatever it says."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def ended_on_token(self) -> bool:
        """Whether its last token is an end mark rather than text."""
        return isinstance(self.stop_reason, int)

    def append(self, token_id: int) -> None:
        """Take a sampled token; sets ``finish_reason`` when it ends the text."""
        assert not self.is_finished
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids and self.num_output_tokens > self.sampling.min_tokens:
            self.finish("stop", token_id)
        elif self.num_output_tokens >= self.max_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End it; the scheduler frees what it holds when it retires finished sequences."""
        self.finish_reason = reason
        self.stop_reason = stop_reason
