"""The beginning of the suite for completion models: building and describing them, and what its tests have at hand."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.load import dumps

from langchain_pagedllm import PagedLLM

PROMPT = "the cache holds the keys"


class Runs(BaseCallbackHandler):
    """What the runs of a model were told."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.tokens: list[str] = []
        self.results: list[Any] = []
        self.errors: list[BaseException] = []

    def on_llm_start(self, serialized: Any, prompts: list[str], **kwargs: Any) -> None:
        self.started += prompts

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.results.append(response)

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        self.errors.append(error)


class AsyncRuns(AsyncCallbackHandler):
    """The same of async runs."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.results: list[Any] = []

    async def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.tokens.append(token)

    async def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.results.append(response)


def info_of(generation: Any) -> dict[str, Any]:
    assert generation.generation_info is not None
    return generation.generation_info


class CompletionModelBasics:
    """Models at temperature 0 and 12 tokens unless a test says otherwise."""

    model_params: dict[str, Any]

    def build(self, **fields: Any) -> PagedLLM:
        return PagedLLM(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **self.model_params, **fields})

    @pytest.fixture
    def model(self) -> PagedLLM:
        return self.build()

    # --- Building and describing ---

    def test_init(self) -> None:
        standard = {"temperature": 0, "max_tokens": 100, "timeout": 60, "stop": [], "max_retries": 2}
        assert PagedLLM(**{**self.model_params, **standard, "api_key": "test"}).timeout == 60

    def test_init_streaming(self) -> None:
        assert self.build(streaming=True).invoke(PROMPT) == self.build().invoke(PROMPT)

    def test_standard_params(self, model: PagedLLM) -> None:
        params = self.build(stop=["x"])._get_ls_params()
        assert (params["ls_provider"], params["ls_model_type"]) == ("pagedllm", "llm")
        assert isinstance(params["ls_model_name"], str)
        assert (params["ls_temperature"], params["ls_max_tokens"], params["ls_stop"]) == (0, 12, ["x"])
        assert model._get_ls_params(model="other")["ls_model_name"] == "other"

    def test_identifying_params(self, model: PagedLLM) -> None:
        """They are the key of the response cache and part of every trace."""
        params = model._identifying_params
        assert {"model_name", "temperature", "max_tokens", "stop", "seed"} <= set(params)
        assert params == self.build(timeout=9, priority=3)._identifying_params
        assert params != self.build(seed=1)._identifying_params

    def test_secrets_stay_inside(self) -> None:
        model = self.build(api_key="sk-very-secret")
        shown = (repr(model), str(model.asdict()), dumps(model), model.model_dump_json(), str(model._get_ls_params()))
        assert not any("sk-very-secret" in text for text in shown)

    def test_pickle_and_copies(self, model: PagedLLM) -> None:
        fields = {name: getattr(model, name) for name in ("temperature", "max_tokens", "base_url", "model_name")}
        unpickled = pickle.loads(pickle.dumps(model))
        assert {name: getattr(unpickled, name) for name in fields} == fields
        want = model.invoke(PROMPT)
        for each in (copy.copy(model), copy.deepcopy(model), model.model_copy(update={"seed": 1})):
            assert each.invoke(PROMPT) == want
