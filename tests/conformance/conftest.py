"""The engines of the suite: in this process, behind our server, and scripted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from conftest import TinyModel
from fake_engine import FakeEngine
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


@pytest.fixture(params=["local", "remote", "fake"])
def subject(request: pytest.FixtureRequest) -> Subject:
    engine = request.getfixturevalue(f"{request.param}_engine")
    source = request.getfixturevalue("local_engine") if request.param == "remote" else engine
    return Subject(engine=engine, source=source)


@pytest.fixture
def engine(subject: Subject) -> Engine:
    return subject.engine
