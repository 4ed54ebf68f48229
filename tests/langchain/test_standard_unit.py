"""LangChain's own unit suite."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import FakeEngine
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_pagedllm import ChatPagedLLM


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatPagedLLM

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smollm2-135m"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        environment = {"PAGEDLLM_API_KEY": "key", "PAGEDLLM_MODEL": "/models/x"}
        return environment, {}, {"api_key": "key", "model": "/models/x"}


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
class TestIntegrationOverFakeEngine(ChatModelIntegrationTests):
    """The integration suite too, without a model: quick, and apart from what a model says."""

    engine = FakeEngine()

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatPagedLLM

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def supported_usage_metadata_details(self) -> dict[str, Any]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> Any:
        model = ChatPagedLLM(engine=self.engine)
        prompt = "A question that is long enough to fill a block. " * 2
        model.invoke(prompt)
        if not stream:
            return model.invoke(prompt)
        chunks = list(model.stream(prompt))
        total = chunks[0]
        for chunk in chunks[1:]:
            total += chunk
        return total
