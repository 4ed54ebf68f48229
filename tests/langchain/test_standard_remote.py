"""LangChain's own suites over a model behind a URL: our server, before the fake engine and the embedded model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import SMOLLM2_FLOAT32
from fake_engine import FakeEngine
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessageChunk
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from served_engine import served

from langchain_pagedllm import ChatPagedLLM
from pagedllm.registry import shared_engine

URL = "http://127.0.0.1:9/v1"


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatPagedLLM

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "org/model", "base_url": URL}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        environment = {"PAGEDLLM_API_KEY": "key", "PAGEDLLM_BASE_URL": URL, "PAGEDLLM_MODEL": "org/model"}
        return environment, {}, {"api_key": "key", "base_url": URL, "model": "org/model"}


class _Integration(ChatModelIntegrationTests):
    base_url = ""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatPagedLLM

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"base_url": self.base_url, "max_tokens": 16, "temperature": 0}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def supported_usage_metadata_details(self) -> dict[str, Any]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatPagedLLM(**self.chat_model_params)
        prompt = "Repeat this sentence, which is long enough to fill a few blocks of the cache. " * 3
        model.invoke(prompt)
        if not stream:
            return model.invoke(prompt)
        total: BaseMessageChunk | None = None
        for chunk in model.stream(prompt):
            total = chunk if total is None else total + chunk
        assert isinstance(total, AIMessage)
        return total


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
class TestIntegrationOverFakeEngine(_Integration):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _serve(cls) -> Iterator[None]:
        with served(FakeEngine()) as cls.base_url:
            yield


@pytest.mark.model
@pytest.mark.slow  # what it adds to the suite above is the embedded model, which the local suite has too
@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
class TestIntegration(_Integration):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _serve(cls, _engines: None) -> Iterator[None]:
        with served(shared_engine(SMOLLM2_FLOAT32)) as cls.base_url:
            yield
