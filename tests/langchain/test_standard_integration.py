"""LangChain's own integration suite over the embedded model. One shared engine serves every test."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessageChunk
from langchain_tests.integration_tests import ChatModelIntegrationTests

from langchain_pagedllm import ChatPagedLLM

# The registry finds one engine for all models of equal engine arguments, here and in the other tests.
PARAMS: dict[str, Any] = {
    "model": "smollm2-135m",
    "max_tokens": 16,
    "temperature": 0,
    "engine_args": {"dtype": "float32"},
}


@pytest.mark.model
@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
class TestIntegration(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatPagedLLM

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return PARAMS

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
        model = ChatPagedLLM(**PARAMS)
        prompt = "Repeat this sentence, which is long enough to fill a few blocks of the cache. " * 3
        model.invoke(prompt)
        if not stream:
            return model.invoke(prompt)
        total: BaseMessageChunk | None = None
        for chunk in model.stream(prompt):
            total = chunk if total is None else total + chunk
        assert isinstance(total, AIMessage)
        return total
