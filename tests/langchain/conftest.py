"""Models over the fake engine."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine

from langchain_pagedllm import ChatPagedLLM, PagedLLM


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def chat(engine: FakeEngine) -> ChatPagedLLM:
    return ChatPagedLLM(engine=engine, temperature=0)


@pytest.fixture
def llm(engine: FakeEngine) -> PagedLLM:
    return PagedLLM(engine=engine, temperature=0)
