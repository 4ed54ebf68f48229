"""LangChain's own integration suite over the embedded model. One shared engine serves every test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_tests.integration_tests import ChatModelIntegrationTests
from standard_suite import EMBEDDED, EmbeddedSuite, each_method

import pagedllm


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    each_method(metafunc, other_marks=pytest.mark.slow)


@pytest.mark.model
@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
class TestIntegration(EmbeddedSuite, ChatModelIntegrationTests):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _two_engines(cls) -> Iterator[None]:
        """For one test another model is asked, whose engine would take the place of the shared one."""
        pagedllm.set_max_engines(2)
        yield
        pagedllm.set_max_engines(1)

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return EMBEDDED

    @property
    def model_override_value(self) -> str:
        return "SmolLM2-135M-Instruct"
