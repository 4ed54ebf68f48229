"""Building, copying and describing models: nothing is loaded, nothing is silently dropped."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import pickle
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField

import langchain_pagedllm
from langchain_pagedllm import ChatPagedLLM, PagedLLM
from langchain_pagedllm.base import PagedModel
from pagedllm.api import SamplingParams
from pagedllm.config import DEFAULT_MODEL, EngineConfig

BOTH = pytest.mark.parametrize("cls", [ChatPagedLLM, PagedLLM])


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[EngineConfig, FakeEngine]:
    """A registry of fake engines in the place of the real one, which would load a model."""
    engines: dict[EngineConfig, FakeEngine] = {}
    module = types.ModuleType("pagedllm.registry")

    def shared_engine(config: EngineConfig) -> FakeEngine:
        return engines.setdefault(config, FakeEngine(model=config.model))

    module.shared_engine = shared_engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pagedllm.registry", module)
    return engines


def test_import_is_quick_and_leaves_torch_alone() -> None:
    """A remote user would pay seconds for a torch that is never used."""
    code = "import sys, langchain_pagedllm as p; p.ChatPagedLLM(); p.PagedLLM(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_public_names() -> None:
    """A name in __all__ that cannot be loaded breaks ``from langchain_pagedllm import *``."""
    for name in langchain_pagedllm.__all__:
        assert getattr(langchain_pagedllm, name) is not None
        assert name in dir(langchain_pagedllm)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        langchain_pagedllm.nothing  # noqa: B018


@BOTH
def test_construction_opens_nothing(cls: Any, registry: dict[EngineConfig, FakeEngine]) -> None:
    """Copies, profiles and benchmarks build models by the dozen; none of them may load an engine."""
    model = cls(temperature=0)
    copy.deepcopy(model)
    _ = (model.asdict(), str(model), repr(model), model._get_ls_params())
    assert registry == {}


@BOTH
def test_default_model_and_environment(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEDLLM_MODEL", raising=False)
    monkeypatch.delenv("PAGEDLLM_API_KEY", raising=False)
    assert cls().model == DEFAULT_MODEL
    assert cls().api_key is None
    monkeypatch.setenv("PAGEDLLM_MODEL", "/models/other")
    monkeypatch.setenv("PAGEDLLM_API_KEY", "from-env")
    assert cls().model == cls().model_name == "/models/other"
    assert cls().api_key.get_secret_value() == "from-env"
    assert cls(model="mine").model == "mine"
    assert cls(model_name="mine").model == "mine"
    assert cls(model=Path("/models/x")).model == "/models/x"


@BOTH
def test_aliases(cls: Any) -> None:
    model = cls(max_completion_tokens=7, stop_sequences=["x"], request_timeout=3)
    assert (model.max_tokens, model.stop, model.timeout) == (7, ["x"], 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_tokenz": 5}, "unknown argument 'max_tokenz'; known: .*max_tokens"),
        ({"n": 0}, "n=0"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens is given twice"),
        ({"temperature": -1}, "temperature=-1"),
        ({"top_p": 0}, "top_p=0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"stop": [""]}, "stop"),
        ({"timeout": 0}, "timeout=0"),
        ({"cache_salt": "a/b"}, "cache_salt='a/b'"),
        ({"engine_args": {"dtipe": "float32"}}, "unknown engine option 'dtipe'; known: .*dtype"),
        ({"engine_args": {"dtype": "int3"}}, "dtype='int3'"),
        ({"engine_args": {"model": "x"}}, "give the model as model="),
        ({"engine": FakeEngine(), "engine_args": {"dtype": "float32"}}, "engine_args have no effect"),
        ({"engine": FakeEngine(), "model": "other"}, "the given engine serves 'fake'"),
        ({"engine": object()}, "engine"),
    ],
)
@BOTH
def test_wrong_argument_is_named(cls: Any, arguments: dict[str, Any], message: str) -> None:
    """A misspelt or impossible option that is dropped in silence shows only in the bill or in the text."""
    with pytest.raises(ValueError, match=message) as caught:
        cls(api_key="secret-key", **arguments)
    assert "secret-key" not in str(caught.value)


@BOTH
def test_all_sampling_parameters_are_fields(cls: Any) -> None:
    """An engine option that the adapters forget could not be set from LangChain."""
    fields = {field.name for field in dataclasses.fields(SamplingParams)} - {"prompt_logprobs"}
    assert fields <= set(cls.model_fields)
    assert set(PagedModel.model_fields) <= set(cls.model_fields)


@BOTH
def test_identifying_params_are_complete_and_hold_no_secret(cls: Any, registry: Any) -> None:
    """What is missing here lets two different models share a cached response."""
    base = cls(api_key="secret-key", cache_salt="tenant-salt")
    others = [
        {"model": "/other"}, {"temperature": 0.5}, {"max_tokens": 3}, {"top_p": 0.5}, {"top_k": 3}, {"seed": 1},
        {"stop": ["x"]}, {"stop_token_ids": [3]}, {"ignore_eos": True}, {"cache_salt": "other"},
        {"engine_args": {"dtype": "float32"}}, {"n": 2}, {"min_p": 0.1}, {"min_tokens": 2}, {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0}, {"repetition_penalty": 1.1}, {"logit_bias": {1: 1.0}}, {"logprobs": True},
    ]  # fmt: skip
    seen = [str(sorted(base.asdict().items()))]
    for options in others:
        seen.append(
            str(sorted(cls(**{"api_key": "secret-key", "cache_salt": "tenant-salt", **options}).asdict().items()))
        )
    assert len(set(seen)) == len(seen)
    assert not any("secret-key" in text or "tenant-salt" in text for text in seen)
    assert "secret-key" not in repr(base)


@BOTH
def test_types_and_tracing_parameters(cls: Any, engine: FakeEngine) -> None:
    model = cls(engine=engine, temperature=0.5, max_tokens=9, stop="x")
    params = model._get_ls_params()
    assert model._llm_type == {ChatPagedLLM: "chat-pagedllm", PagedLLM: "pagedllm"}[cls]
    assert params["ls_provider"] == "pagedllm"
    assert params["ls_model_type"] == {ChatPagedLLM: "chat", PagedLLM: "llm"}[cls]
    assert (params["ls_model_name"], params["ls_temperature"], params["ls_max_tokens"]) == ("fake", 0.5, 9)
    assert params["ls_stop"] == ["x"]
    assert model._get_ls_params(stop=["y"], model="other", max_tokens=2)["ls_stop"] == ["y"]
    assert model._get_ls_params(model="other")["ls_model_name"] == "other"
    assert model.metadata["lc_versions"]["langchain-pagedllm"] == langchain_pagedllm.__version__
    assert model.lc_secrets == {"api_key": "PAGEDLLM_API_KEY"}
    assert not model.is_lc_serializable()


def test_profile_needs_no_engine(tmp_path: Path, registry: dict[EngineConfig, FakeEngine]) -> None:
    """Middleware asks for max_input_tokens before the first call; a missing model must not break construction."""
    profile = ChatPagedLLM(engine=FakeEngine(max_model_len=77)).profile
    assert profile is not None
    assert profile["max_input_tokens"] == 77
    assert profile["tool_calling"] is True
    assert ChatPagedLLM(model=str(tmp_path / "nothing")).profile is None
    limited = ChatPagedLLM(model=str(tmp_path / "nothing"), engine_args={"max_model_len": 50}).profile
    assert limited is not None
    assert limited["max_input_tokens"] == 50
    assert registry == {}


@pytest.mark.model
def test_profile_of_embedded_model(registry: dict[EngineConfig, FakeEngine]) -> None:
    profile = ChatPagedLLM(model=DEFAULT_MODEL).profile
    assert profile is not None
    assert profile["max_input_tokens"] == 8192
    limited = ChatPagedLLM(model=DEFAULT_MODEL, engine_args={"max_model_len": 256}).profile
    assert limited is not None
    assert limited["max_input_tokens"] == 256
    assert registry == {}


@BOTH
def test_all_copies_find_the_same_engine(cls: Any, registry: dict[EngineConfig, FakeEngine]) -> None:
    """An engine per copy would load the model again for every configurable call, pickle and chain."""
    model = cls(temperature=0, engine_args={"dtype": "float32"})
    want = model.invoke("Hello")
    copies = [
        copy.copy(model),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        model.model_copy(update={"max_tokens": 500}),
        model.with_config(tags=["x"]),
        model.configurable_fields(max_tokens=ConfigurableField(id="m")).with_config(configurable={"m": 500}),
    ]
    for each in copies:
        answer = each.invoke("Hello")
        assert getattr(answer, "content", answer) == getattr(want, "content", want)
    assert list(registry) == [EngineConfig(dtype="float32")]
    assert len(registry[EngineConfig(dtype="float32")].requests) == 1 + len(copies)


def test_chain_pickles_and_copies(registry: dict[EngineConfig, FakeEngine]) -> None:
    """Adapters that hold a lock cannot be sent to a worker process."""
    chain = ChatPromptTemplate.from_template("Say {word}") | ChatPagedLLM(temperature=0) | StrOutputParser()
    want = chain.invoke({"word": "x"})
    assert pickle.loads(pickle.dumps(chain)).invoke({"word": "x"}) == want
    assert copy.deepcopy(chain).invoke({"word": "x"}) == want


@BOTH
def test_own_engine_is_shared_by_copies_and_left_behind_by_pickle(cls: Any, engine: FakeEngine) -> None:
    model = cls(engine=engine)
    assert copy.deepcopy(model).engine is engine
    assert copy.copy(model).engine is engine
    assert pickle.loads(pickle.dumps(model)).engine is None
    assert model.engine is engine
    assert "engine" not in model.model_dump()


@BOTH
def test_call_may_name_another_model(cls: Any, registry: dict[EngineConfig, FakeEngine], engine: FakeEngine) -> None:
    """LangChain traces a call's ``model``; an answer from the constructor's would make the trace untrue."""
    cls(model="a").invoke("x", model="b")
    assert [config.model for config in registry] == ["b"]
    with pytest.raises(ValueError, match="the given engine serves 'fake'"):
        cls(engine=engine).invoke("x", model="b")


@BOTH
@pytest.mark.parametrize("way", ["ainvoke", "astream"])
async def test_loading_does_not_block_the_event_loop(cls: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call loads for seconds; a server's other tasks must go on meanwhile."""

    def shared_engine(config: EngineConfig) -> FakeEngine:
        time.sleep(0.5)
        return FakeEngine(model=config.model)

    module = types.ModuleType("pagedllm.registry")
    module.shared_engine = shared_engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pagedllm.registry", module)

    async def call() -> None:
        if way == "ainvoke":
            await cls().ainvoke("x")
        else:
            async for _ in cls().astream("x"):
                pass

    task, num_beats = asyncio.create_task(call()), 0
    while not task.done():
        await asyncio.sleep(0.01)
        num_beats += 1
    await task
    assert num_beats > 10


@BOTH
def test_configurable_model_still_streams(cls: Any, engine: FakeEngine) -> None:
    """LangChain passes every field when it rebuilds a model; a default of streaming=False would then mean never."""
    model = cls(engine=engine, temperature=0).configurable_fields(seed=ConfigurableField(id="s"))
    assert len(list(model.with_config(configurable={"s": 3}).stream("Hello"))) > 5
