"""Requests sent through an engine, and what their consumer saw of each."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..api import Engine, GenerateRequest

__all__ = ["Answer", "ask", "ask_together", "ask_with_users"]


@dataclass(kw_only=True)
class Answer:
    """One request and its tokens.

    Args:
        submitted: When it was sent, in seconds on the monotonic clock, which is also that of the engine's steps.
        arrivals: When each token came, over all choices, in order.
        token_ids: The tokens in that order.
        num_cached_tokens: Prompt tokens found in the prefix cache.
    """

    submitted: float
    arrivals: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """From being sent to its first token."""
        return self.arrivals[0] - self.submitted

    @property
    def duration_s(self) -> float:
        """From being sent to its last token."""
        return self.arrivals[-1] - self.submitted

    @property
    def gaps_s(self) -> list[float]:
        """Between each token and the one before it; of a request with one choice."""
        return [b - a for a, b in itertools.pairwise(self.arrivals)]


async def ask(engine: Engine, request: GenerateRequest) -> Answer:
    """Send a request and take its tokens as they come.

    Raises:
        PagedLLMError: It is refused or fails.
    """
    answer = Answer(submitted=time.monotonic())
    async for chunk in engine.astream(request):
        # Chunks that waited for us came merged, so one may bring several tokens, which then arrive together.
        answer.arrivals += [time.monotonic()] * len(chunk.token_ids)
        answer.token_ids += chunk.token_ids
        if chunk.usage is not None:
            answer.num_cached_tokens = chunk.usage.cached_tokens
    return answer


async def ask_together(engine: Engine, requests: Sequence[GenerateRequest]) -> list[Answer]:
    """Send all requests at once."""
    # An event loop rather than a thread for each request: 64 threads would take the CPUs from the engine.
    return await asyncio.gather(*(ask(engine, request) for request in requests))


async def ask_with_users(
    engine: Engine, requests: Sequence[GenerateRequest], num_users: int
) -> tuple[list[Answer], float]:
    """Let users send the requests, each its next one when it has the answer to its last.

    Returns:
        The answers in order of the requests, and when the first user found no request left.
    """
    answers: list[Answer | None] = [None] * len(requests)
    numbered = iter(list(enumerate(requests)))
    ends: list[float] = []

    async def user() -> None:
        for number, request in numbered:
            answers[number] = await ask(engine, request)
        ends.append(time.monotonic())

    await asyncio.gather(*(user() for _ in range(num_users)))
    return [answer for answer in answers if answer is not None], min(ends)
