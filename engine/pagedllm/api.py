"""The contract between front ends and engines: frozen request and response types, and the Engine protocol.

Requests are validated once, when they are built; inside the engine their fields are right.
"""

from __future__ import annotations

import dataclasses
import math
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from .errors import InvalidRequestError, PagedLLMError

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
    "Message",
    "ModelInfo",
    "RequestOutput",
    "SamplingParams",
    "Timings",
    "Usage",
]

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Args:
        max_tokens: Most tokens to generate; None: the rest of the context.
        temperature: 0 (or below 1e-5) is greedy; None: the model's ``generation_config``, else 1.0.
        top_p: Keep the smallest set of tokens whose probability reaches this, in (0, 1]; None: the model's, else 1.0.
        top_k: Keep the most probable ``top_k`` tokens; 0 or -1 keeps all; None: the model's, else all.
        seed: Makes sampling repeatable: the noise depends only on seed and token position.
        stop: Up to 16 strings that end the text; matched on text and cut off exactly.
        stop_token_ids: Token ids that end the text, besides the model's own EOS ids.
        ignore_eos: Go on after an EOS id.

    Raises:
        InvalidRequestError: Naming the parameter, its value and what is allowed.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        # Lists are what callers have at hand; tuples are what a frozen, hashable value needs.
        object.__setattr__(self, "stop", _as_tuple("stop", self.stop, str))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids, int))
        _check_int("max_tokens", self.max_tokens, minimum=1)
        _check_int("top_k", self.top_k, minimum=-1)
        _check_int("seed", self.seed, minimum=-(2**63), maximum=2**64 - 1)
        _check_float("temperature", self.temperature, "must be a finite number of at least 0", lambda x: x >= 0)
        _check_float("top_p", self.top_p, "must be in (0, 1]", lambda x: 0 < x <= 1)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError.for_value("ignore_eos", self.ignore_eos, "must be True or False")
        if len(self.stop) > 16:
            raise InvalidRequestError.for_value("stop", self.stop, "at most 16 stop strings")
        if "" in self.stop:
            raise InvalidRequestError.for_value("stop", self.stop, "a stop string must not be empty")
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, minimum=0)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping of keyword options; an unknown one is an error that names it."""
        known = [item.name for item in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise InvalidRequestError(f"unknown option {name!r}; known: {', '.join(known)}", param=name)
        return cls(**options)


@dataclass(frozen=True, kw_only=True)
class CacheHints:
    """Wishes about KV reuse. They change when a request is computed, never which tokens it gets.

    Args:
        salt: Requests share cached prefixes only with requests of the same salt; None is a salt of its own.
    """

    salt: str | None = None

    def __post_init__(self) -> None:
        # vLLM's rule for the same field, so that a salt accepted here is accepted there.
        if self.salt is not None and (
            not isinstance(self.salt, str)
            or not 0 < len(self.salt) <= 128
            or any(char in "@/\\\0" for char in self.salt)
        ):
            raise InvalidRequestError.for_value(
                "cache_salt", self.salt, "must be 1 to 128 characters without '@', '/', '\\' and NUL"
            )


@dataclass(frozen=True, kw_only=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str

    def __post_init__(self) -> None:
        if not isinstance(self.role, str) or not self.role:
            raise InvalidRequestError.for_value("messages.role", self.role, "must be a non-empty string")
        if not isinstance(self.content, str):
            raise InvalidRequestError.for_value("messages.content", self.content, "must be a string")


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One request: exactly one of ``prompt`` (text or token ids) and ``messages`` (a chat).

    Args:
        prompt: Text, encoded with the model's special tokens; or token ids, taken as they are.
        messages: A chat, rendered by the model's chat template.
        sampling: How to choose tokens and when to stop.
        hints: Wishes about KV reuse.
        request_id: Names the request in ``abort`` and in its chunks; unique among those in flight.
    """

    prompt: str | tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    hints: CacheHints = field(default_factory=CacheHints)
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("give exactly one of prompt and messages", param="prompt")
        if self.messages is not None:
            object.__setattr__(self, "messages", _as_tuple("messages", self.messages, Message))
        elif not isinstance(self.prompt, str):
            object.__setattr__(self, "prompt", _as_tuple("prompt", self.prompt, int))
        if not (self.messages or self.prompt):
            param = "prompt" if self.messages is None else "messages"
            raise InvalidRequestError(f"{param} is empty: at least one token is needed to go on from", param=param)


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts of one request.

    Args:
        prompt_tokens: Tokens of the prompt, special tokens included.
        completion_tokens: Tokens generated, through the one that ended the text.
        cached_tokens: Prompt tokens whose KV was found in the prefix cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


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


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A piece of a streamed answer. The last one of each choice has a finish reason, usage and timings.

    Args:
        text: What is new; whole characters only, possibly empty.
        token_ids: The tokens behind it; may run ahead of the text while characters or stop strings are incomplete.
        index: Which choice it belongs to.
        stop_reason: The stop string or token id that ended the text, if one did.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    timings: Timings | None = None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One finished text of a request."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    index: int = 0
    stop_reason: str | int | None = None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The whole answer to one request."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings

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
        kv_bytes_per_token: Bytes of KV cache that one token takes, over all layers.
    """

    model: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int


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
        prefix_hits: Prompt tokens found there.
        num_running_peak: Most sequences that ever ran at once.
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
    def reset_prefix_cache(self) -> None: ...
    async def areset_prefix_cache(self) -> None: ...
    def close(self) -> None: ...
    async def aclose(self) -> None: ...


def _as_tuple(param: str, value: Any, item_type: type) -> tuple[Any, ...]:
    items = tuple(value) if isinstance(value, (list, tuple)) else None
    if items is None or any(not isinstance(item, item_type) or isinstance(item, bool) for item in items):
        raise InvalidRequestError.for_value(param, value, f"must be a list of {item_type.__name__}")
    return items


def _check_int(param: str, value: Any, *, minimum: int, maximum: int | None = None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum or (maximum and value > maximum):
        limit = f"of at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        raise InvalidRequestError.for_value(param, value, f"must be a whole number {limit}")


def _check_float(param: str, value: Any, allowed: str, is_allowed: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidRequestError.for_value(param, value, allowed)
    if not is_allowed(value):
        raise InvalidRequestError.for_value(param, value, allowed)
