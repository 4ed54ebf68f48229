"""Servers that tests share."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from fake_engine import FakeEngine
from ray_cluster import started
from server_helpers import TIMEOUT_S, Running, serving

from pagedllm.api import Engine
from pagedllm.config import EngineConfig
from pagedllm.local import LocalEngine


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def server(fake: FakeEngine) -> Iterator[Running]:
    """A server over the fake engine."""
    with serving(fake) as running:
        yield running


SMOLLM = EngineConfig(dtype="float32", max_model_len=1024)


@pytest.fixture(scope="module", params=["alone", pytest.param("ray", marks=pytest.mark.slow)])
def _smollm_and_engine(request: pytest.FixtureRequest) -> Iterator[tuple[Running, Engine]]:
    """One engine behind our server, or two as replicas on Ray behind its ingress."""
    if request.param == "alone":
        with LocalEngine(SMOLLM) as engine, serving(engine) as running:
            yield running, engine
        return
    with (
        started(SMOLLM, server={}) as (cluster, url),
        cluster.engine() as engine,
        httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client,
    ):
        yield Running(url, cluster, client), engine


@pytest.fixture
def smollm(_smollm_and_engine: tuple[Running, Engine]) -> Running:
    """SmolLM2-135M-Instruct in float32 with a context of 1024 tokens, served."""
    return _smollm_and_engine[0]


@pytest.fixture
def smollm_engine(_smollm_and_engine: tuple[Running, Engine]) -> Engine:
    """What computes its answers."""
    return _smollm_and_engine[1]
