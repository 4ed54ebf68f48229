"""LangChain's own suites over a model behind a URL: our server, before the fake engine and the embedded model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import SMOLLM2_FLOAT32
from fake_engine import FakeEngine
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from served_engine import served
from standard_suite import SAMPLING, EmbeddedSuite, StandardSuite, each_method

from langchain_pagedllm import ChatPagedLLM
from pagedllm.registry import shared_engine

URL = "http://127.0.0.1:9/v1"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    each_method(metafunc)


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatPagedLLM

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "org/model", "base_url": URL}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "org/other"

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        environment = {"PAGEDLLM_API_KEY": "key", "PAGEDLLM_BASE_URL": URL, "PAGEDLLM_MODEL": "org/model"}
        return environment, {}, {"api_key": "key", "base_url": URL, "model": "org/model"}


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
class TestIntegrationOverFakeEngine(StandardSuite, ChatModelIntegrationTests):
    base_url = ""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _serve(cls) -> Iterator[None]:
        with served(FakeEngine()) as cls.base_url:
            yield

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"base_url": self.base_url, **SAMPLING}

    @property
    def model_override_value(self) -> str:
        return "fake"


@pytest.mark.model
@pytest.mark.slow  # what it adds to the suite above is the embedded model, which the local suite has too
@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
class TestIntegration(EmbeddedSuite, ChatModelIntegrationTests):
    base_url = ""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _serve(cls, _engines: None) -> Iterator[None]:
        with served(shared_engine(SMOLLM2_FLOAT32)) as cls.base_url:
            yield

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"base_url": self.base_url, **SAMPLING}

    @property
    def model_override_value(self) -> str:
        return "smollm2-135m"
