"""Short ways to ask an engine for something."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from pagedllm.api import CacheHints, EngineStats, GenerateRequest, Message, RequestOutput, SamplingParams
from pagedllm.errors import PagedLLMError


def request(
    prompt: str | Sequence[int] | list[Message],
    max_tokens: int | None = 16,
    *,
    salt: str | None = None,
    **sampling: Any,
) -> GenerateRequest:
    """A greedy request, unless ``sampling`` says otherwise."""
    options = {"temperature": 0.0, "max_tokens": max_tokens} | sampling
    if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Message):
        prompt_field: dict[str, Any] = {"messages": tuple(prompt)}
    else:
        prompt_field = {"prompt": prompt if isinstance(prompt, str) else tuple(prompt)}
    return GenerateRequest(sampling=SamplingParams(**options), hints=CacheHints(salt=salt), **prompt_field)


def output_of(result: RequestOutput | PagedLLMError) -> RequestOutput:
    """The output, or the error raised."""
    if isinstance(result, PagedLLMError):
        raise result
    return result


def run(engine: Any, *requests: GenerateRequest) -> list[RequestOutput]:
    """Run requests together."""
    return [output_of(result) for result in engine.generate(requests)]


def token_ids(output: RequestOutput) -> list[int]:
    return list(output.choices[0].token_ids)


def ids(count: int, offset: int = 0) -> list[int]:
    """A prompt of valid, unremarkable token ids of SmolLM2; different offsets share no block."""
    return [(300 + offset * 911 + i * 37) % 40_000 + 300 for i in range(count)]


def assert_at_rest(stats: EngineStats) -> None:
    """Nothing runs, waits or holds a block."""
    assert (stats.num_running, stats.num_waiting, stats.num_referenced_blocks) == (0, 0, 0)
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


def wait_until_at_rest(engine: Any, seconds: float = 10.0) -> EngineStats:
    deadline = time.monotonic() + seconds
    while (stats := engine.stats()).num_running or stats.num_waiting:
        assert time.monotonic() < deadline, f"still busy: {stats}"
        time.sleep(0.005)
    assert_at_rest(stats)
    return stats
