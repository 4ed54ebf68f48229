"""LangChain's own unit suite."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import FakeEngine
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from standard_suite import StandardSuite, each_method

from langchain_pagedllm import ChatPagedLLM


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    each_method(metafunc)


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatPagedLLM

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smollm2-135m"}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "other"

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        environment = {"PAGEDLLM_API_KEY": "key", "PAGEDLLM_MODEL": "/models/x"}
        return environment, {}, {"api_key": "key", "model": "/models/x"}


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
class TestIntegrationOverFakeEngine(StandardSuite, ChatModelIntegrationTests):
    """The integration suite too, without a model: quick, and apart from what a model says."""

    engine = FakeEngine()

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine}

    @property
    def model_override_value(self) -> str:
        return "fake"
