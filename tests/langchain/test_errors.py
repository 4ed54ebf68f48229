"""Engine errors as LangChain's."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
from fake_engine import FakeEngine
from langchain_core import exceptions as core

from langchain_pagedllm import ChatPagedLLM, PagedLLM
from langchain_pagedllm import errors as ours
from pagedllm import errors as engine_errors

BOTH = pytest.mark.parametrize("cls", [ChatPagedLLM, PagedLLM])

EXPECTED = [
    (engine_errors.PagedLLMError, core.ModelError, False),
    (engine_errors.InvalidRequestError, core.ModelInvalidRequestError, False),
    (engine_errors.ContextLengthError, core.ContextOverflowError, False),
    (engine_errors.ContextLengthError, core.ModelInvalidRequestError, False),
    (engine_errors.ConfigError, core.ModelError, False),
    (engine_errors.ModelLoadError, core.ModelError, False),
    (engine_errors.ModelNotFoundError, core.ModelNotFoundError, False),
    (engine_errors.ModelFileError, core.ModelError, False),
    (engine_errors.UnsupportedModelError, core.ModelError, False),
    (engine_errors.MissingDependencyError, core.ModelError, False),
    (engine_errors.AccessError, core.ModelError, False),
    (engine_errors.AuthenticationError, core.ModelAuthenticationError, False),
    (engine_errors.PermissionDeniedError, core.ModelPermissionDeniedError, False),
    (engine_errors.EngineError, core.ModelAPIError, True),
    (engine_errors.OverloadedError, core.ModelAPIError, True),
    (engine_errors.QueueFullError, core.ModelAPIError, True),
    (engine_errors.QueueTimeoutError, core.ModelAPIError, True),
    (engine_errors.RateLimitError, core.ModelRateLimitError, True),
    (engine_errors.ConnectionFailedError, core.ModelConnectionError, True),
    (engine_errors.ResponseTimeoutError, core.ModelTimeoutError, True),
    (engine_errors.EngineClosedError, core.ModelAPIError, True),
    (engine_errors.EngineDeadError, core.ModelAPIError, True),
    (engine_errors.ForkedProcessError, core.ModelAPIError, False),
]


def test_every_engine_error_is_listed() -> None:
    """A new engine error must be given its place in LangChain's tree."""
    assert {case[0].__name__ for case in EXPECTED} == set(engine_errors.__all__)


@pytest.mark.parametrize(("theirs", "langchain", "is_retryable"), EXPECTED)
def test_both_trees_catch(theirs: type[Any], langchain: type[Any], is_retryable: bool) -> None:
    original = theirs("went wrong")
    error = ours.as_langchain_error(original)
    assert isinstance(error, theirs)
    assert isinstance(error, langchain)
    assert isinstance(error, core.ModelError)
    assert error.is_retryable is is_retryable
    assert (str(error), error.__cause__) == ("went wrong", original)
    assert ours.as_langchain_error(error) is error
    assert str(pickle.loads(pickle.dumps(error))) == "went wrong"


def test_subclass_and_attributes_survive() -> None:
    class Special(engine_errors.ContextLengthError):
        pass

    error = ours.as_langchain_error(Special("too long", param="prompt"))
    assert isinstance(error, ours.ContextLengthError)
    assert (error.param, error.code) == ("prompt", "context_length_exceeded")


async def all_ways(model: Any, prompt: str) -> list[BaseException]:
    """The error of each way to call a model."""
    errors: list[BaseException] = []
    for call in (lambda: model.invoke(prompt), lambda: list(model.stream(prompt)), lambda: model.batch([prompt])):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the caller looks at it
            call()
        errors.append(caught.value)
    for method in (model.ainvoke, lambda text: model.abatch([text])):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            await method(prompt)
        errors.append(caught.value)
    with pytest.raises(Exception) as caught:  # noqa: PT011
        async for _ in model.astream(prompt):
            pass
    return [*errors, caught.value]


@BOTH
async def test_same_error_from_every_hook(cls: Any) -> None:
    """An agent that summarises on ContextOverflowError must meet it in a stream as well."""
    model = cls(engine=FakeEngine(max_model_len=50))
    for error in await all_ways(model, "long " * 50):
        assert isinstance(error, core.ContextOverflowError)
        assert isinstance(error, engine_errors.ContextLengthError)
        assert "50" in str(error)
        assert isinstance(error.__cause__, engine_errors.ContextLengthError)


@BOTH
async def test_dead_engine(cls: Any) -> None:
    """A dead worker is a server failure, which retry middleware may try again; the reason stays visible."""
    engine = FakeEngine()
    engine.die(RuntimeError("worker exploded"))
    for error in await all_ways(cls(engine=engine), "x"):
        assert isinstance(error, core.ModelAPIError)
        assert isinstance(error, engine_errors.EngineDeadError)
        assert "worker exploded" in str(error)


@BOTH
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokenz": 5}, "unknown option 'max_tokenz'; known: .*max_tokens"),
        ({"n": 0}, "n=0"),
        ({"base_url": "x"}, "unknown option 'base_url'"),
        ({"temperature": -1}, "temperature=-1"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"stop": [""]}, "stop"),
        ({"timeout": -1}, "timeout=-1"),
        ({"timeout": "soon"}, "timeout='soon'"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
async def test_wrong_call_option_is_named(cls: Any, options: dict[str, Any], message: str) -> None:
    engine = FakeEngine()
    for error in await all_ways(cls(engine=engine).bind(**options), "x"):
        assert isinstance(error, core.ModelInvalidRequestError)
        assert re.search(message, str(error))
    assert engine.requests == []


@BOTH
def test_empty_prompt(cls: Any) -> None:
    model = cls(engine=FakeEngine())
    with pytest.raises(core.ModelInvalidRequestError, match="empty"):
        model.invoke("" if cls is PagedLLM else [])


def test_context_error_names_no_secret_response() -> None:
    """LangChain reads an HTTP response from errors that have one; these have none."""
    assert not hasattr(ours.as_langchain_error(engine_errors.EngineDeadError("x")), "response")
