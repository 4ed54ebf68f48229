"""The contract between front ends and engines: frozen request and response types, and the Engine protocol.

Requests are validated once, when they are built; inside the engine their fields are right.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from .errors import PagedLLMError
from .generate_request import GenerateRequest
from .hints import CacheHints, HintOutcome, Retain
from .message import Message, ToolCall
from .output_format import StructuredOutput, Tool, ToolCallDelta
from .sampling_params import SamplingParams

__all__ = [
    "AsyncChunkStream",
    "CacheHints",
    "Choice",
    "Chunk",
    "ChunkStream",
    "Engine",
    "EngineStats",
    "FinishReason",
    "GenerateRequest",
    "Health",
    "HintOutcome",
    "Message",
    "ModelInfo",
    "RequestOutput",
    "Retain",
    "SamplingParams",
    "StructuredOutput",
    "Timings",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
]

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts of one request.

    Args:
        prompt_tokens: Tokens of the prompt, special tokens included; counted once for any number of choices.
        completion_tokens: Tokens generated over all choices, through those that ended the texts.
        cached_tokens: Prompt tokens whose KV was found in the prefix cache.
        cache_creation_tokens: Prompt tokens whose KV this request added to the prefix cache.
        reasoning_tokens: Tokens of ``completion_tokens`` that are the model's reasoning.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cache_creation_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log probability under the raw logits.

    Args:
        token_id: Of the token.
        token: Its text; U+FFFD where it is only a part of a character.
        logprob: Natural logarithm; always finite.
        top: The most probable tokens at its place, best first, as many as were asked for.
    """

    token_id: int
    token: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Where a request's time went, in seconds.

    Args:
        queue_s: From arrival to the first step that computed it.
        ttft_s: From arrival to its first token.
        total_s: From arrival to its end.
    """

    queue_s: float
    ttft_s: float
    total_s: float

    @property
    def prefill_s(self) -> float:
        """From the first step that computed it to its first token."""
        return self.ttft_s - self.queue_s

    @property
    def decode_s(self) -> float:
        """From its first token to its end."""
        return self.total_s - self.ttft_s


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A piece of a streamed answer.

    Args:
        text: What is new; whole characters only, possibly empty.
        token_ids: The tokens behind it; may run ahead of the text while characters or stop strings are incomplete.
        index: Which choice it belongs to.
        reasoning: What is new of the model's reasoning, which comes before the text and is no part of it.
        tool_calls: What is new of its calls; comes after ``text`` where both are there.
        logprobs: One for each of ``token_ids``, if asked for.
        prompt_logprobs: One for each prompt token (None for the first), if asked for; on the request's last chunk.
        finish_reason: On the last chunk of each choice.
        stop_reason: The stop string or token id that ended the text, if one did.
        usage: Of the whole request; on its last chunk.
        timings: Likewise.
        hints: What became of the request's hints; on its last chunk.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    hints: tuple[HintOutcome, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One finished text of a request.

    Args:
        reasoning: What the model thought before it answered, where its answers show that.
        tool_calls: Calls that it asks for. If ``finish_reason`` is not ``"tool_calls"``, the last one may have been
            cut: its arguments are the piece that there is.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    index: int = 0
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The whole answer to one request; ``choices`` are in order of their index."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    hints: tuple[HintOutcome, ...] = ()

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What a client may want to know about the loaded model.

    Args:
        model: The name or path that the engine was asked for.
        architecture: Such as ``"llama"``.
        max_model_len: Longest sequence, prompt and completion together, in tokens.
        kernels: Which implementation of the operations serves, such as ``"cpu"`` or ``"reference"``.
        kv_bytes_per_token: Bytes of KV cache that one token takes, over all layers.
        max_num_seqs: Most sequences in one step; 0 where it is not known.
    """

    model: str
    architecture: str
    dtype: str
    kernels: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int
    max_num_seqs: int = 0


@dataclass(frozen=True, kw_only=True)
class Health:
    """Whether the engine serves; ``reason`` tells why not."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot between two steps; counters run from the engine's start.

    Args:
        num_blocks: Size of the KV pool; always free + cached + referenced.
        num_free_blocks: Blocks that hold nothing.
        num_cached_blocks: Blocks kept only for reuse; they make room when needed.
        num_referenced_blocks: Blocks in use by running sequences.
        prefix_queries: Prompt tokens looked up in the prefix cache.
        prefix_hits: Prompt tokens found there; what a preempted sequence finds again of its own does not count.
        num_running_peak: Most sequences that ever ran at once.
        num_swapped: Preempted sequences whose KV waits in host memory; they count among those waiting.
        num_pinned_blocks: Device blocks that pins keep, referenced or cached.
        num_unused_slots: Token slots in running sequences' blocks that hold nothing yet: internal fragmentation.
        num_host_blocks: Size of the host's pool; its cached blocks hold prefixes, those neither free nor cached the KV
            of preempted sequences.
        prefix_hits_on_host: Those of ``prefix_hits`` that came back from the host.
        num_waits_for_prefix: How often a request let a step pass because another was computing its prefix.
        num_preemptions_by_swap: Of all preemptions, those whose KV went to the host.
        num_preemptions_for_prefill: Of all preemptions, those that made room for a prompt rather than for a token.
        hint_outcomes: ``(hint, outcome, how often)``.
        num_evictions: Cached blocks that made room on the device.
        block_lifetime_s: Mean time from caching to eviction.
        block_idle_before_evict_s: Mean time that evicted blocks had not been used.
        block_reuse_gap_s: Mean time for which cached blocks that were used again had not been used.
        num_refused: Requests refused because too many waited.
        num_timed_out: Requests that waited too long.
    """

    num_running: int
    num_waiting: int
    num_running_peak: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_referenced_blocks: int
    prefix_queries: int
    prefix_hits: int
    num_preemptions: int
    num_steps: int
    num_generated_tokens: int
    num_swapped: int = 0
    num_pinned_blocks: int = 0
    num_unused_slots: int = 0
    num_host_blocks: int = 0
    num_free_host_blocks: int = 0
    num_cached_host_blocks: int = 0
    prefix_hits_on_host: int = 0
    num_waits_for_prefix: int = 0
    num_preemptions_by_swap: int = 0
    num_preemptions_for_prefill: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_pins: int = 0
    hint_outcomes: tuple[tuple[str, str, int], ...] = ()
    num_evictions: int = 0
    block_lifetime_s: float = 0.0
    block_idle_before_evict_s: float = 0.0
    block_reuse_gap_s: float = 0.0
    num_refused: int = 0
    num_timed_out: int = 0

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pool in use by running sequences, 0 to 1."""
        return self.num_referenced_blocks / self.num_blocks


class ChunkStream(Protocol):
    """Chunks of one request. Closing, interrupting or dropping it before the end aborts the request."""

    def __iter__(self) -> Iterator[Chunk]: ...
    def __next__(self) -> Chunk: ...
    def close(self) -> None: ...


class AsyncChunkStream(Protocol):
    """As ChunkStream, for an event loop."""

    def __aiter__(self) -> AsyncIterator[Chunk]: ...
    async def __anext__(self) -> Chunk: ...
    async def aclose(self) -> None: ...


@runtime_checkable
class Engine(Protocol):
    """What every engine offers, in this process or behind a URL. Methods are safe from any thread and event loop.

    ``generate`` takes a list because that is what continuous batching is for; each item of its answer is an output or
    the error of that request alone. ``stream`` raises a request's error instead. Whatever may block has an async twin.
    """

    def generate(self, requests: Sequence[GenerateRequest]) -> list[RequestOutput | PagedLLMError]: ...
    async def agenerate(self, requests: Sequence[GenerateRequest]) -> list[RequestOutput | PagedLLMError]: ...
    def stream(self, request: GenerateRequest) -> ChunkStream: ...
    def astream(self, request: GenerateRequest) -> AsyncChunkStream: ...
    def abort(self, request_id: str) -> None: ...

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def detokenize(self, token_ids: Sequence[int]) -> str: ...
    def count_tokens(self, request: GenerateRequest) -> int: ...

    def model_info(self) -> ModelInfo: ...
    def health(self) -> Health: ...
    def stats(self) -> EngineStats: ...
    async def astats(self) -> EngineStats: ...
    def match_prefix(self, request: GenerateRequest) -> int: ...
    async def amatch_prefix(self, request: GenerateRequest) -> int: ...
    def warm(self, request: GenerateRequest) -> RequestOutput: ...
    async def awarm(self, request: GenerateRequest) -> RequestOutput: ...
    def reset_prefix_cache(self) -> None: ...
    async def areset_prefix_cache(self) -> None: ...
    def close(self) -> None: ...
    async def aclose(self) -> None: ...
