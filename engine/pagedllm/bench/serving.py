"""How a server is timed: requests sent at their times of arrival over HTTP, seen from their clients."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import httpx_sse
import numpy as np

from .. import wire
from ..errors import ConfigError, EngineError
from .datasets import Prompt

__all__ = ["Answer", "Server", "ServingPlan", "ServingRun", "arrival_times", "describe_server", "run_plan"]

_MAX_ERROR_CHARS = 300


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """What is sent where, and when.

    Args:
        base_url: Where OpenAI's API begins.
        model: The name that requests ask for.
        api_key: Sent as a bearer token; never shown.
        request_rate: Arrivals per second at random times (a Poisson process); infinity sends all at once.
        max_concurrency: Most requests under way; one that arrives when so many are waits, and its time counts from
            when it is sent. None: no limit.
        ignore_eos: Generate all tokens asked for.
        timeout_s: For one request, from sending it to its last token.
        seed: Of the arrivals.
    """

    base_url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    request_rate: float = math.inf
    max_concurrency: int | None = None
    ignore_eos: bool = True
    timeout_s: float = 600.0
    seed: int = 0


@dataclass(kw_only=True)
class Answer:
    """One request as its client saw it; times in seconds of ``time.perf_counter``.

    Args:
        sent: When its first byte was about to be sent.
        arrivals: Of the pieces of text, or of tokens without text.
        ended: When the stream ended.
        error: Why there is no whole answer; empty if there is one.
    """

    sent: float
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class ServingRun:
    """All requests of a run, in the order of their arrival."""

    answers: list[Answer]
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class Server:
    """What a server tells about a model; other servers than ours do not tell the size of the vocabulary."""

    model: str
    vocab_size: int | None


def arrival_times(num_prompts: int, request_rate: float, seed: int) -> list[float]:
    """Seconds from the start at which requests arrive: a Poisson process, whose gaps are exponential; the first is 0.

    Raises:
        ConfigError: The rate is not positive.
    """
    if not request_rate > 0:
        raise ConfigError.for_value("request_rate", request_rate, "must be above 0 requests per second, or inf")
    if math.isinf(request_rate):
        return [0.0] * num_prompts
    gaps = np.random.default_rng(seed).exponential(1.0 / request_rate, max(num_prompts - 1, 0))
    return [0.0, *np.cumsum(gaps).tolist()][:num_prompts]


async def run_plan(plan: ServingPlan, prompts: Sequence[Prompt], on_done: Callable[[], None]) -> ServingRun:
    """Send all prompts and wait for all answers.

    Args:
        on_done: Called after each answer, for a progress bar.
    """
    times = arrival_times(len(prompts), plan.request_rate, plan.seed)
    places = asyncio.Semaphore(plan.max_concurrency or len(prompts) or 1)
    async with _client(plan) as client:
        start = time.perf_counter()

        async def send(prompt: Prompt, arrival: float) -> Answer:
            await asyncio.sleep(max(0.0, start + arrival - time.perf_counter()))
            async with places:
                answer = await _ask(client, plan, prompt)
            on_done()
            return answer

        answers = await asyncio.gather(*map(send, prompts, times))
        return ServingRun(answers=answers, duration_s=time.perf_counter() - start)


async def describe_server(base_url: str, api_key: str | None, model: str | None = None) -> Server:
    """Ask a server for its models.

    Args:
        model: Which; None: the first.

    Raises:
        EngineError: The server cannot be reached or has no such model.
    """
    async with _client(ServingPlan(base_url=base_url, model="", api_key=api_key, timeout_s=30.0)) as client:
        try:
            response = await client.get(f"{base_url}/models")
            response.raise_for_status()
            entries = response.json()["data"]
            names = [str(entry["id"]) for entry in entries]
        except httpx.HTTPError as error:
            raise EngineError(f"cannot ask {base_url} for its models: {_reason(error)}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise EngineError(f"{base_url}/models does not name its models") from error
    if not names or (model is not None and model not in names):
        raise EngineError(f"the server has no model {model or ''}; it has {', '.join(names) or 'none'}")
    index = 0 if model is None else names.index(model)
    told = entries[index].get(wire.EXTENSION) or {}
    return Server(model=names[index], vocab_size=told.get("vocab_size"))


def _client(plan: ServingPlan) -> httpx.AsyncClient:
    headers = {} if plan.api_key is None else {"authorization": f"Bearer {plan.api_key}"}
    # As many connections as requests: what must wait should wait in the server that is measured.
    return httpx.AsyncClient(
        headers=headers, timeout=plan.timeout_s, limits=httpx.Limits(max_connections=None, keepalive_expiry=4.0)
    )


async def _ask(client: httpx.AsyncClient, plan: ServingPlan, prompt: Prompt) -> Answer:
    endpoint, body = _body(plan, prompt)
    answer = Answer(sent=time.perf_counter())
    try:
        await asyncio.wait_for(_read(client, f"{plan.base_url}/{endpoint}", body, answer), plan.timeout_s)
    except (httpx.HTTPError, httpx_sse.SSEError, asyncio.TimeoutError, ValueError, _ServerError) as error:
        answer.error = _reason(error)
    answer.ended = time.perf_counter()
    if not answer.error and not answer.arrivals:
        answer.error = "the answer has no token"
    return answer


def _body(plan: ServingPlan, prompt: Prompt) -> tuple[str, dict[str, Any]]:
    body = {
        "model": plan.model,
        "max_tokens": prompt.num_output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if plan.ignore_eos:
        body["ignore_eos"] = True
    if prompt.is_chat:
        return "chat/completions", body | {"messages": prompt.content}
    return "completions", body | {"prompt": prompt.content}


async def _read(client: httpx.AsyncClient, url: str, body: dict[str, Any], answer: Answer) -> None:
    """Note when the pieces of an answer come; raises for whatever is not a whole answer."""
    async with httpx_sse.aconnect_sse(client, "POST", url, json=body) as source:
        if not source.response.is_success:
            await source.response.aread()
            raise _ServerError(f"HTTP {source.response.status_code}: {source.response.text}")
        async for event in source.aiter_sse():
            if event.data == "[DONE]":
                return
            now = time.perf_counter()
            chunk = json.loads(event.data)
            if not isinstance(chunk, dict) or "error" in chunk:
                raise _ServerError(str(chunk))
            if any(_has_token(choice) for choice in chunk.get("choices") or ()):
                answer.arrivals.append(now)
            if usage := chunk.get("usage"):
                answer.num_prompt_tokens = usage["prompt_tokens"]
                answer.num_output_tokens = usage["completion_tokens"]
                answer.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        raise _ServerError("the stream ended before its end was announced")


def _has_token(choice: dict[str, Any]) -> bool:
    return bool(choice.get("text") or (choice.get("delta") or {}).get("content") or choice.get("token_ids"))


class _ServerError(Exception):
    """An answer that is no success."""


def _reason(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__.lstrip('_')}: {error}".split())
    return text if len(text) <= _MAX_ERROR_CHARS else text[: _MAX_ERROR_CHARS - 1] + "…"
