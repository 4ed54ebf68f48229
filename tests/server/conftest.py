"""Servers that tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine
from server_helpers import Running, serving

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


@pytest.fixture(scope="session")
def smollm_engine() -> Iterator[LocalEngine]:
    """SmolLM2-135M-Instruct in float32 with a context of 1024 tokens."""
    with LocalEngine(EngineConfig(dtype="float32", max_model_len=1024)) as engine:
        yield engine


@pytest.fixture(scope="session")
def smollm(smollm_engine: LocalEngine) -> Iterator[Running]:
    with serving(smollm_engine) as running:
        yield running
