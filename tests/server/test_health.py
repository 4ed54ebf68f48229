"""Whether the server says what state it is in."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families
from server_helpers import Running, serving, wait_until

from pagedllm.config import EngineConfig
from pagedllm.local import LocalEngine


def test_dead_engine(tiny_model: object) -> None:
    """When the worker dies, health says so, and no client waits for ever."""
    config = EngineConfig(model=tiny_model.path, dtype="float32")  # type: ignore[attr-defined]
    with LocalEngine(config) as engine, serving(engine) as running:
        assert running.client.get("/health").status_code == 200
        release = threading.Event()
        engine._worker.call(lambda core: release.wait(20))
        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(running.complete, [5, 6, 7], max_tokens=4) for _ in range(4)]
            wait_until(lambda: running.server.service.tenants.num_open == 4)

            def die(core: object) -> None:
                raise SystemExit("killed")

            engine._worker.call(die)
            release.set()
            answers = [item.result() for item in waiting]
        assert [answer.status_code for answer in answers] == [503] * 4
        assert {answer.json()["error"]["code"] for answer in answers} == {"engine_dead"}
        wait_until(lambda: running.client.get("/health").status_code == 503)
        assert "killed" not in running.client.get("/health").text
        assert running.client.get("/ready").status_code == 503
        assert running.complete("a").status_code == 503


def test_stuck_engine() -> None:
    """A step that never ends looks like life to all but those who wait for it."""
    engine = FakeEngine()
    with serving(engine, stuck_after_s=0.2) as running:
        assert running.client.get("/health").status_code == 200
        engine.is_stuck = True
        wait_until(lambda: running.client.get("/health").status_code == 503)
        engine.is_stuck = False
        wait_until(lambda: running.client.get("/health").status_code == 200)


def test_metrics(server: Running) -> None:
    """Dashboards for vLLM look for these names."""
    server.complete("Hello", max_tokens=9)
    server.complete("Hello", max_tokens=9, stream=True)
    server.complete("Hello", top_p=3)
    wait_until(lambda: "num_requests_running" in server.client.get("/metrics").text)
    families = {family.name: family for family in text_string_to_metric_families(server.client.get("/metrics").text)}
    expected = {
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries"),
        *("prefix_cache_hits", "prompt_tokens", "prompt_tokens_cached", "generation_tokens", "num_preemptions"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
        *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
        *("request_decode_time_seconds", "request_inference_time_seconds", "request_prefill_kv_computed_tokens"),
        *("iteration_tokens_total", "request_success", "admission_rejections"),
    }
    assert {f"pagedllm:{name}" for name in expected} <= set(families)
    values = {(sample.name, *sample.labels.values()): sample.value for f in families.values() for sample in f.samples}
    assert values["pagedllm:generation_tokens_total",] == 18
    assert values["pagedllm:prompt_tokens_total",] == 10
    assert values["pagedllm:request_success_total", "length"] == 2
    assert values["pagedllm:admission_rejections_total", "invalid_request"] == 1
    assert values["pagedllm:time_to_first_token_seconds_count",] == 2


@pytest.mark.parametrize("path", ["/health", "/ready", "/version"])
def test_operations(server: Running, path: str) -> None:
    assert server.client.get(path).status_code == 200


def test_cache_paths(server: Running, fake: FakeEngine) -> None:
    prompt = "Hello " * 10
    body = {"prompt": prompt}
    assert server.client.post("/v1/cache/match", json=body).json() == {"num_tokens": 0}
    warmed = server.client.post("/v1/cache/warm", json=body)
    assert warmed.json()["usage"]["completion_tokens"] == 0
    assert warmed.json()["pagedllm"]["requests"][0]["hints"][0]["outcome"] == "accepted"
    assert server.client.post("/v1/cache/match", json=body).json() == {"num_tokens": 48}
    assert server.client.post("/v1/cache/match", json=body | {"cache_salt": "x"}).json() == {"num_tokens": 0}
    assert server.client.get("/v1/cache/stats").json()["num_cached_blocks"] == 3
    assert server.client.post("/v1/cache/reset").json() == {"reset": True}
    assert fake.stats().num_cached_blocks == 0


def test_tokens(server: Running) -> None:
    answer = server.client.post("/tokenize", json={"prompt": "ab"}).json()
    assert answer == {"count": 2, "max_model_len": 4096, "tokens": [97, 98]}
    assert server.client.post("/detokenize", json={"tokens": [97, 98]}).json() == {"prompt": "ab"}
    chat = {"messages": [{"role": "user", "content": "ab"}]}
    assert server.client.post("/tokenize", json=chat).json()["count"] == 20
    for tokens in ([-1], [1 << 30], ["a"], [1.5], "ab"):
        assert server.client.post("/detokenize", json={"tokens": tokens}).status_code == 400
