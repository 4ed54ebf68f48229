"""One text being generated, as the scheduler sees it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..api import CacheHints, FinishReason, HintOutcome, SamplingParams
from .watched_edges import Edge

__all__ = ["Breakpoint", "PrefixMatch", "Sequence", "SwappedBlocks"]


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A place in the prompt up to which its KV is to be pinned.

    Args:
        num_tokens: Tokens before it; may be more than the prompt has.
        ttl_s: Seconds for which to keep the pin.
    """

    num_tokens: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class SwappedBlocks:
    """KV of a preempted sequence that waits in host memory.

    Args:
        start: Position in the block table of the first of them; what is before it is left to the prefix cache.
        host_blocks: In order of position.
        num_tokens: Tokens whose KV was there when it was preempted.
    """

    start: int
    host_blocks: tuple[int, ...]
    num_tokens: int


@dataclass(slots=True)
class PrefixMatch:
    """The cached prefix of a waiting sequence, as it was found.

    Args:
        nodes: Of the prefix cache.
        generation: Of the last node, which lives as long as all of them.
        missing: The edge that would make it longer, which the cache watches; None if it is as long as it may be, or if
            nothing with its salt was cached.
        epoch: The cache's: while it is the same, there is no longer match.
    """

    nodes: list[int]
    generation: int
    missing: Edge | None
    epoch: int


@dataclass(eq=False, kw_only=True, slots=True)  # slots: every step reads a dozen fields of every sequence
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
        hints: The request's; the salt separates its cached prefixes from others'.
        breakpoints: Places of its prompt to pin, from the hints.
        index: Which choice of the request it is.
        leader: The request's first choice, whose prompt blocks the others share; None for the first itself.
        block_table: KV blocks in order of position. It grows at its end; an entry changes only to a block with the
            same KV.
        num_writable_tokens: Up to where its blocks are there and, from ``num_computed_tokens`` on, its alone, as far as
            is known without looking.
        nodes: Prefix-cache nodes of its leading full blocks; it holds a reference on each.
        publishes: Whether its full blocks still go to the prefix cache (not after a reset while it ran).
        swapped: Where its KV is while it waits after having been preempted.
        arrival_number: How many sequences arrived before it.
        num_tokens_when_resumed: Its length when it came back from its last preemption; None if it never did.
        match: Its cached prefix when it was last looked at in the queue.
        lent_rank: The rank of a request that waits for what this one computes, if that is better than its own.
        outcomes: What became of its hints so far.
        answer_form: How its text is to be written and read, which is no affair of whom schedules it.
        stop_token_ids: Tokens that end the text.
        generates: Whether it samples tokens, rather than only computing its prompt.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    sampling: SamplingParams
    seed: int
    eos_token_ids: frozenset[int]
    hints: CacheHints = field(default_factory=CacheHints)
    breakpoints: tuple[Breakpoint, ...] = ()
    index: int = 0
    leader: Sequence | None = None
    arrival_time: float = field(default_factory=time.monotonic)
    first_scheduled_time: float | None = None
    first_token_time: float | None = None

    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    num_cached_host_tokens: int = 0
    num_created_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    num_writable_tokens: int = 0
    nodes: list[int] = field(default_factory=list)
    publishes: bool = True
    swapped: SwappedBlocks | None = None
    arrival_number: int = 0
    num_tokens_when_resumed: int | None = None
    lent_rank: tuple[int, ...] | None = None
    match: PrefixMatch | None = None
    outcomes: list[HintOutcome] = field(default_factory=list)
    answer_form: object | None = None
    stop_token_ids: frozenset[int] = field(init=False)
    generates: bool = field(init=False)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def __post_init__(self) -> None:
        eos_token_ids = frozenset() if self.sampling.ignore_eos else self.eos_token_ids
        self.stop_token_ids = eos_token_ids.union(self.sampling.stop_token_ids)
        self.generates = not self.hints.warm

    @property
    def salt(self) -> str | None:
        return self.hints.salt

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
    def max_num_tokens(self) -> int:
        """Length at which it ends whatever it says."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def max_usable_prefix(self) -> int:
        """Most tokens to take from the cache: one is left, because a step must yield logits."""
        return 0 if self.needs_all_prompt_logits else self.num_tokens - 1

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def ended_on_token(self) -> bool:
        """Whether its last token is an end mark rather than text."""
        return isinstance(self.stop_reason, int)

    def append(self, token_id: int) -> None:
        """Take a sampled token; sets ``finish_reason`` when it ends the text."""
        assert self.finish_reason is None
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids and self.num_output_tokens > self.sampling.min_tokens:
            self.finish("stop", token_id)
        elif len(self.token_ids) >= self.num_prompt_tokens + self.max_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End it; the scheduler frees what it holds when it retires finished sequences."""
        self.finish_reason = reason
        self.stop_reason = stop_reason
