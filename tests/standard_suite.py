"""What LangChain's own suites are told about ChatPagedLLM: every capability of text is on."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessageChunk

from langchain_pagedllm import ChatPagedLLM

__all__ = ["EMBEDDED", "SAMPLING", "EmbeddedSuite", "StandardSuite", "each_method"]

# Greedy, so that a suite says the same each time. Without a penalty a model of this size repeats itself without end.
SAMPLING: dict[str, Any] = {"max_tokens": 160, "temperature": 0, "frequency_penalty": 1.0}
# The registry finds one engine for all models of equal engine arguments, here and in the other tests.
EMBEDDED: dict[str, Any] = {"model": "smollm2-135m", "engine_args": {"dtype": "float32"}, **SAMPLING}
_PROMPT = "Repeat this sentence, which is long enough to fill a few blocks of the cache. " * 3


class StandardSuite:
    """Mixed into a suite of LangChain, before it; see ``each_method`` for tests of structured output."""

    structured_method = "json_schema"

    @pytest.fixture(autouse=True)
    def _method(self, request: pytest.FixtureRequest) -> None:
        self.structured_method = getattr(request, "param", "json_schema")

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatPagedLLM

    @property
    def chat_model_params(self) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": self.structured_method}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> dict[str, Any]:
        kinds = ["cache_read_input", "cache_creation_input"]
        return {"invoke": kinds, "stream": kinds}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatPagedLLM(**self.chat_model_params)
        self._ask(model, stream=False)
        return self._ask(model, stream=stream)

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        # Under a salt of its own nothing is cached yet.
        salt = f"{type(self).__name__}-{stream}"
        return self._ask(ChatPagedLLM(**{**self.chat_model_params, "cache_salt": salt}), stream=stream)

    def _ask(self, model: ChatPagedLLM, *, stream: bool) -> AIMessage:
        if not stream:
            return model.invoke(_PROMPT, max_tokens=4)
        total: BaseMessageChunk | None = None
        for chunk in model.stream(_PROMPT, max_tokens=4):
            total = chunk if total is None else total + chunk
        assert isinstance(total, AIMessage)
        return total


class EmbeddedSuite(StandardSuite):
    """Of the embedded model: all but what a model of its size does not do."""

    @pytest.mark.xfail(reason="left to itself, SmolLM2-135M called the tool of this test for 0 of 20 seeds")
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)  # type: ignore[misc]


def each_method(metafunc: pytest.Metafunc, *, other_marks: Any = ()) -> None:
    """For ``pytest_generate_tests``: run tests of structured output with all three methods.

    Args:
        other_marks: Of the runs that are not of the default method.
    """
    if metafunc.function.__name__.startswith("test_structured_output"):
        others = [pytest.param(name, marks=other_marks) for name in ("function_calling", "json_mode")]
        metafunc.parametrize("_method", ["json_schema", *others], indirect=True)
