"""The suite for completion models: over an engine in this process, and over the same engine behind a URL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import TinyModel
from langchain_core.language_models import BaseLLM
from llm_suite import CompletionModelSuite
from served_engine import served

from langchain_pagedllm import PagedLLM
from pagedllm.local import LocalEngine


@pytest.fixture(scope="module")
def shared(tiny_model: TinyModel) -> Iterator[LocalEngine]:
    with tiny_model.engine() as engine:
        yield engine


class TestLocal(CompletionModelSuite):
    @pytest.fixture(autouse=True)
    def _params(self, shared: LocalEngine) -> None:
        self.model_params = {"engine": shared}


class TestRemote(CompletionModelSuite):
    @pytest.fixture(scope="class")
    @staticmethod
    def url(shared: LocalEngine) -> Iterator[str]:
        with served(shared) as url:
            yield url

    @pytest.fixture(autouse=True)
    def _params(self, url: str) -> None:
        self.model_params = {"base_url": url}


def test_init_from_env(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"PAGEDLLM_API_KEY": "key", "PAGEDLLM_BASE_URL": "http://127.0.0.1:9/v1", "PAGEDLLM_MODEL": "org/m"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    model = PagedLLM()
    assert model.api_key is not None
    found: dict[str, Any] = {
        "PAGEDLLM_API_KEY": model.api_key.get_secret_value(),
        "PAGEDLLM_BASE_URL": model.base_url,
        "PAGEDLLM_MODEL": model.model,
    }
    assert found == environment


def test_both_run_the_whole_suite() -> None:
    """A test that one backend overrides is a difference that nobody sees."""
    assert issubclass(PagedLLM, BaseLLM)
    suite = {name for name in dir(CompletionModelSuite) if name.startswith("test_")}
    assert len(suite) >= 30
    for backend in (TestLocal, TestRemote):
        assert not suite & set(vars(backend))
