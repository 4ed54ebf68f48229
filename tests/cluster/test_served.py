"""Replicas on Ray behind the ingress: that they serve, and what becomes of requests when one of them is killed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from ray_cluster import started
from tiny_models import write_hf_llama

from pagedllm.config import EngineConfig

TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Cluster:
    """A server over two replicas.

    Args:
        engine: Over the same replicas, in this process.
    """

    url: str
    engine: Any

    def num_generated(self) -> dict[str, int]:
        """Tokens that each replica has generated since it began."""
        return {name: stats.num_generated_tokens for name, stats in self.each_stats().items()}

    def each_stats(self) -> dict[str, Any]:
        from ray import serve

        from pagedllm.cluster.application import APP_NAME, ENGINES
        from pagedllm.cluster.messages import Target

        handle = serve.get_deployment_handle(ENGINES, app_name=APP_NAME)
        return {
            name: handle.stats.remote(Target(replica=name)).result(timeout_s=TIMEOUT_S)
            for name in self.engine.replica_names
        }

    def kill(self, name: str) -> None:
        """End a replica's process as a crash would."""
        import ray

        (actor,) = [item for item in ray.util.list_named_actors(all_namespaces=True) if item["name"].endswith(name)]
        ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]), no_restart=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Slow kernels and three seats, so that what is sent is still running, or waiting, when a replica is killed."""
    folder = tmp_path_factory.mktemp("cluster") / "tiny"
    write_hf_llama(folder, max_position_embeddings=4096)
    options = {"dtype": "float32", "max_model_len": 4096, "kernels": "reference", "max_num_seqs": 3}
    config = EngineConfig(model=str(folder), **options)
    with started(config, server={}) as (running, url), running.engine() as engine:
        yield Cluster(url, engine)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


def prompt_of(number: int, num_tokens: int = 40) -> list[int]:
    return [20 + (number * 31 + index * 7) % 200 for index in range(num_tokens)]


def test_serves(cluster: Cluster) -> None:
    """From one end to the other: the routes of a single server, and a prefix that is found again where it is."""
    with httpx.Client(base_url=cluster.url, timeout=TIMEOUT_S, trust_env=False) as client:
        body = {"prompt": prompt_of(1, 100), "max_tokens": 4, "temperature": 0}
        answers = [client.post("/v1/completions", json=body).json() for _ in range(4)]
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached == [0, 96, 96, 96]
        # Two prompts in one call are two requests side by side.
        both = client.post("/v1/completions", json=body | {"prompt": [prompt_of(1, 100), prompt_of(2, 100)]}).json()
        assert both["choices"][0]["text"] == answers[0]["choices"][0]["text"]
        wrong = client.post("/v1/completions", json=body | {"prompt": [5] * 5000})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": True}
        lines = client.post("/v1/chat/completions", json=chat).text.split("\n")
        assert "data: [DONE]" in lines


@dataclass
class Outcome:
    """What came of a stream.

    Args:
        num_tokens: Events with a token.
        error: The error event's, if it ended with one.
    """

    num_tokens: int = 0
    error: dict[str, Any] | None = None
    is_done: bool = False


async def read_stream(client: httpx.AsyncClient, number: int, begun: asyncio.Semaphore) -> Outcome:
    body = {"prompt": prompt_of(number), "max_tokens": 2000, "ignore_eos": True, "stream": True}
    outcome = Outcome()
    async with client.stream("POST", "/v1/completions", json=body | {"return_token_ids": True}) as response:
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                outcome.is_done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    outcome.error = event["error"]
                    continue
                if not outcome.num_tokens:
                    begun.release()
                outcome.num_tokens += sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
    return outcome


@pytest.mark.slow
async def test_killed_replica(cluster: Cluster) -> None:
    """Its streams end with an error that says so; what it had not begun runs elsewhere; others notice nothing."""
    names = set(cluster.engine.replica_names)
    assert len(names) == 2
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=TIMEOUT_S, trust_env=False, limits=limits) as client:
        begun = asyncio.Semaphore(0)
        streams = [asyncio.create_task(read_stream(client, 100 + number, begun)) for number in range(6)]
        for _ in streams:
            await begun.acquire()
        body = {"max_tokens": 5, "ignore_eos": True}
        waiting = [
            asyncio.create_task(client.post("/v1/completions", json=body | {"prompt": prompt_of(200 + number)}))
            for number in range(6)
        ]
        await asyncio.to_thread(
            wait_until, lambda: sum(item.num_waiting for item in cluster.each_stats().values()) == 6
        )
        before = await asyncio.to_thread(cluster.each_stats)
        victim = max(before, key=lambda name: before[name].num_waiting)
        (survivor,) = names - {victim}
        assert before[victim].num_waiting > 0
        await asyncio.to_thread(cluster.kill, victim)
        outcomes = await asyncio.gather(*streams)
        answers = await asyncio.gather(*waiting)
    lost = [outcome for outcome in outcomes if outcome.error is not None]
    assert len(lost) == before[victim].num_running
    assert {outcome.error["code"] for outcome in lost if outcome.error} == {"engine_dead"}
    kept = [outcome for outcome in outcomes if outcome.error is None]
    assert [(outcome.num_tokens, outcome.is_done) for outcome in kept] == [(2000, True)] * before[survivor].num_running
    assert [answer.status_code for answer in answers] == [200] * 6
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {5}
    await asyncio.to_thread(_assert_a_new_one_takes_traffic, cluster, victim, survivor)


def _assert_a_new_one_takes_traffic(cluster: Cluster, victim: str, survivor: str) -> None:
    wait_until(lambda: len(cluster.engine.replica_names) == 2)
    (new,) = set(cluster.engine.replica_names) - {survivor}
    assert new != victim
    with httpx.Client(base_url=cluster.url, timeout=TIMEOUT_S, trust_env=False) as client:
        number = iter(range(300, 10_000))

        def takes_traffic() -> bool:
            body = {"prompt": prompt_of(next(number)), "max_tokens": 3, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).status_code == 200
            return cluster.num_generated()[new] > 0

        wait_until(takes_traffic)
