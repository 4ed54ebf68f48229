"""Routing policies over real engines: the same prefix traffic through one cluster for each policy."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from ...api import EngineStats
from ...cluster.config import ClusterConfig
from ...cluster.run import ClusterServer
from ...config import EngineConfig
from ...errors import EngineError
from ...server.config import ServerConfig

__all__ = ["LivePlan", "compare_routers"]

_TIMEOUT_S = 600.0
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class LivePlan:
    """Prefix traffic over replicas.

    Args:
        num_replicas: Engines.
        num_prefixes: Prefixes, equally frequent.
        prefix_len: Tokens of each.
        question_len: Tokens after it, different in each request.
        output_len: Tokens to generate.
        num_requests: Measured, after each prefix was sent once.
        pool_share: How much of all prefixes together each KV pool holds.
        load: Arrival rate, as a share of what the cluster did under ``power_of_two`` when everything arrived at once.
        seed: Of prompts, order and arrivals.
    """

    num_replicas: int = 2
    num_prefixes: int = 16
    prefix_len: int = 384
    question_len: int = 24
    output_len: int = 12
    num_requests: int = 120
    pool_share: float = 0.6
    load: float = 0.7
    seed: int = 0

    @property
    def pool_tokens(self) -> int:
        """Of each engine's KV pool."""
        return round(self.pool_share * self.num_prefixes * self.prefix_len)


def compare_routers(
    config: EngineConfig, plan: LivePlan, policies: Sequence[str], bytes_per_token: int
) -> dict[str, Any]:
    """Run the traffic once for each policy, on engines that begin with empty caches.

    Args:
        config: Of each engine; its pool is set by the plan.
        policies: Values of ``ClusterConfig.router``.
        bytes_per_token: What a token takes of the KV pool.

    Returns:
        The arrival rate, and the figures of each policy.
    """
    config = dataclasses.replace(config, kv_cache_memory_bytes=plan.pool_tokens * bytes_per_token)
    rate = _measure_capacity(config, plan) * plan.load
    return {"rate": rate, "policies": [_measure(config, plan, policy, rate) for policy in policies]}


def _measure_capacity(config: EngineConfig, plan: LivePlan) -> float:
    """Requests per second when all arrive at once, under Ray's own policy."""
    with _cluster(config, plan, "power_of_two") as server:
        url = server.start()
        prompts = _prompts(plan)
        asyncio.run(_send(url, prompts[: plan.num_prefixes], [0.0] * plan.num_prefixes, plan))
        rest = prompts[plan.num_prefixes :][: max(16, plan.num_requests // 2)]
        start = time.perf_counter()
        asyncio.run(_send(url, rest, [0.0] * len(rest), plan))
        return len(rest) / (time.perf_counter() - start)


def _measure(config: EngineConfig, plan: LivePlan, policy: str, rate: float) -> dict[str, Any]:
    rng, prompts = random.Random(plan.seed + 1), _prompts(plan)
    first, rest = prompts[: plan.num_prefixes], prompts[plan.num_prefixes :]
    gaps = [rng.expovariate(rate) for _ in rest]
    with _cluster(config, plan, policy) as server:
        url = server.start()
        asyncio.run(_send(url, first, [index / rate for index in range(len(first))], plan))
        with server.engine() as engine:
            answers, running = asyncio.run(_send_and_watch(url, rest, np.cumsum(gaps).tolist(), plan, engine))
    ttft = np.array([answer.ttft_s for answer in answers]) * 1e3
    means = np.mean(running, axis=0)
    return {
        "policy": policy,
        "cached_tokens": sum(answer.cached_tokens for answer in answers),
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "ttft_p50_ms": round(float(np.percentile(ttft, 50)), 1),
        "ttft_p90_ms": round(float(np.percentile(ttft, 90)), 1),
        "imbalance": round(float(means.max() / means.mean()), 3),
        "running_tokens": [round(float(mean), 1) for mean in means],
    }


@dataclass(frozen=True)
class _Answer:
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


def _cluster(config: EngineConfig, plan: LivePlan, policy: str) -> ClusterServer:
    cluster = ClusterConfig(replicas=plan.num_replicas, num_cpus=1, router=policy)
    return ClusterServer(config, ServerConfig(port=0, shutdown_timeout_s=2.0), cluster)


def _prompts(plan: LivePlan) -> list[list[int]]:
    """Each prefix once, in order, and then at random; no two questions are the same."""
    rng = random.Random(plan.seed)
    prefixes = [[rng.randrange(300, 40_000) for _ in range(plan.prefix_len)] for _ in range(plan.num_prefixes)]
    order = [*range(plan.num_prefixes), *(rng.randrange(plan.num_prefixes) for _ in range(plan.num_requests))]
    return [prefixes[index] + [rng.randrange(300, 40_000) for _ in range(plan.question_len)] for index in order]


async def _send_and_watch(
    url: str, prompts: Sequence[list[int]], arrivals: Sequence[float], plan: LivePlan, engine: Any
) -> tuple[list[_Answer], list[list[int]]]:
    """The answers, and every tenth of a second the tokens that run at each replica."""
    running: list[list[int]] = []

    async def watch() -> None:
        while True:
            stats: list[EngineStats] = await engine.aeach_stats()
            if len(stats) == plan.num_replicas:
                running.append([item.num_referenced_blocks * engine.model_info().block_size for item in stats])
            await asyncio.sleep(_POLL_S)

    watcher = asyncio.create_task(watch())
    try:
        return await _send(url, prompts, arrivals, plan), running
    finally:
        watcher.cancel()


async def _send(url: str, prompts: Sequence[list[int]], arrivals: Sequence[float], plan: LivePlan) -> list[_Answer]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False, limits=limits) as client:
        pairs = zip(prompts, arrivals, strict=True)
        return await asyncio.gather(*(_ask(client, prompt, arrival, plan) for prompt, arrival in pairs))


async def _ask(client: httpx.AsyncClient, prompt: list[int], arrival_s: float, plan: LivePlan) -> _Answer:
    await asyncio.sleep(arrival_s)
    body = {"prompt": prompt, "max_tokens": plan.output_len, "temperature": 0, "ignore_eos": True, "stream": True}
    start, ttft_s = time.perf_counter(), None
    async with client.stream(
        "POST", "/v1/completions", json=body | {"stream_options": {"include_usage": True}}
    ) as response:
        if response.status_code != 200:
            raise EngineError(f"the server answered with status {response.status_code}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if ttft_s is None:
                ttft_s = time.perf_counter() - start
            if event.get("usage"):
                usage = event["usage"]
    assert ttft_s is not None
    return _Answer(ttft_s, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])
