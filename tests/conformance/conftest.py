"""The engines of the suite: in this process, behind our server, scripted, and replicas on Ray, directly and served."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from conftest import TinyModel
from fake_engine import FakeEngine
from ray_cluster import started
from served_engine import served
from tool_templates import HERMES

from pagedllm.api import Engine
from pagedllm.local import LocalEngine
from pagedllm.remote import RemoteConfig, RemoteEngine

MAX_MODEL_LEN = 512
# Tells of tools in few words: every byte is a token of the tiny model.
TEMPLATE = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + HERMES


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An engine under test.

    Args:
        engine: What is asked.
        source: The engine that computes the answers: behind the URL, or the same one.
    """

    engine: Engine
    source: Any


@pytest.fixture(scope="session")
def local_engine(tiny_model: TinyModel) -> Iterator[LocalEngine]:
    with tiny_model.engine(max_model_len=MAX_MODEL_LEN, chat_template=TEMPLATE) as engine:
        yield engine


@pytest.fixture(scope="session")
def remote_engine(local_engine: LocalEngine) -> Iterator[RemoteEngine]:
    with served(local_engine) as url, RemoteEngine(RemoteConfig(base_url=url)) as engine:
        yield engine


@pytest.fixture(scope="session")
def fake_engine() -> FakeEngine:
    return FakeEngine(max_model_len=MAX_MODEL_LEN, delay_s=0.0005)


@pytest.fixture(scope="module")
def tiny_cluster(tiny_model: TinyModel) -> Iterator[Any]:
    # Slow kernels: an abort has three processes to pass, and is to come before the answer's end.
    config = tiny_model.config(max_model_len=MAX_MODEL_LEN, chat_template=TEMPLATE, kernels="reference")
    with started(config, server={}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster_engine(tiny_cluster: Any) -> Iterator[Any]:
    with tiny_cluster[0].engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def ray_engine(tiny_cluster: Any) -> Iterator[RemoteEngine]:
    with RemoteEngine(RemoteConfig(base_url=f"{tiny_cluster[1]}/v1")) as engine:
        yield engine


# Who computes the answers, where the engine that is asked does not.
SOURCES = {"remote": "local_engine", "ray": "cluster_engine"}


@pytest.fixture(
    params=[
        *("local", "remote", "fake"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("cluster", "ray")),
    ]
)
def subject(request: pytest.FixtureRequest) -> Subject:
    engine = request.getfixturevalue(f"{request.param}_engine")
    return Subject(engine=engine, source=request.getfixturevalue(SOURCES.get(request.param, f"{request.param}_engine")))


@pytest.fixture
def engine(subject: Subject) -> Engine:
    return subject.engine
