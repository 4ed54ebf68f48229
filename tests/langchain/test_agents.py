"""Registration with LangChain, and the middleware for agents."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from fake_engine import FakeEngine
from langchain.agents import create_agent
from langchain.chat_models import init_chat_model
from langchain_core.language_models import FakeListChatModel
from langgraph.checkpoint.memory import InMemorySaver

from langchain_pagedllm import ChatPagedLLM, PagedLLMPromptCachingMiddleware, register
from langchain_pagedllm.errors import MissingDependencyError
from pagedllm.local import LocalEngine


@pytest.fixture
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    import langchain.chat_models.base as base

    monkeypatch.setattr(base, "_BUILTIN_PROVIDERS", dict(base._BUILTIN_PROVIDERS))


@pytest.mark.usefixtures("_table")
def test_register() -> None:
    """LangChain looks for providers in a table of its own and nowhere else."""
    with pytest.raises(ValueError, match="pagedllm"):
        init_chat_model("pagedllm:smollm2-135m")
    register()
    register()
    model = init_chat_model("pagedllm:smollm2-135m", temperature=0)
    assert isinstance(model, ChatPagedLLM)
    assert (model.model, model.temperature) == ("smollm2-135m", 0)
    named = init_chat_model("pagedllm:org/model:q4", base_url="http://127.0.0.1:9/v1")
    assert named.model == "org/model:q4"
    assert create_agent("pagedllm:smollm2-135m") is not None


def test_register_without_langchain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langchain.chat_models.base", None)
    with pytest.raises(MissingDependencyError, match=r"langchain-pagedllm\[agents\]"):
        register()


def ask(agent: Any, text: str, thread: str | None = "user-17") -> Any:
    config = {"configurable": {"thread_id": thread}} if thread else {}
    return agent.invoke({"messages": [{"role": "user", "content": text}]}, config)


def test_middleware_sets_hints_and_touches_no_message(engine: FakeEngine, chat: ChatPagedLLM) -> None:
    middleware = PagedLLMPromptCachingMiddleware(ttl="1h")
    agent = create_agent(chat, system_prompt="Be brief.", middleware=[middleware], checkpointer=InMemorySaver())
    state = ask(agent, "Hello")
    hints = engine.requests[-1].hints
    assert [place.ttl_s for place in hints.retain] == [3600.0]
    assert hints.prefix_key is not None
    assert "user-17" not in hints.prefix_key
    assert "cache_control" not in str([message.content for message in state["messages"]])
    ask(agent, "And?")
    assert engine.requests[-1].hints.prefix_key == hints.prefix_key
    ask(agent, "Hello", "user-18")
    assert engine.requests[-1].hints.prefix_key != hints.prefix_key


async def test_middleware_async_and_without_thread(engine: FakeEngine, chat: ChatPagedLLM) -> None:
    agent = create_agent(chat, middleware=[PagedLLMPromptCachingMiddleware(session_from=None, ttl=9)])
    await agent.ainvoke({"messages": [{"role": "user", "content": "Hello"}]})
    hints = engine.requests[-1].hints
    assert (hints.prefix_key, [place.ttl_s for place in hints.retain]) == (None, [9.0])
    ask(create_agent(chat, middleware=[PagedLLMPromptCachingMiddleware()]), "Hello", None)
    assert engine.requests[-1].hints.prefix_key is None


def test_short_conversations_are_left_alone(engine: FakeEngine, chat: ChatPagedLLM) -> None:
    agent = create_agent(chat, middleware=[PagedLLMPromptCachingMiddleware(min_messages_to_cache=2)])
    ask(agent, "Hello")
    assert engine.requests[-1].hints.retain == ()


def test_other_models() -> None:
    other = FakeListChatModel(responses=["Hi"] * 3)

    def run(behavior: Any) -> Any:
        middleware = PagedLLMPromptCachingMiddleware(unsupported_model_behavior=behavior)
        return ask(create_agent(other, middleware=[middleware]), "Hello")

    assert run("ignore")["messages"][-1].content == "Hi"
    with pytest.warns(UserWarning, match="FakeListChatModel"):
        run("warn")
    with pytest.raises(ValueError, match="FakeListChatModel"):
        run("raise")


@pytest.mark.parametrize(
    "wrong",
    [
        *({"type": "persistent"}, {"ttl": "2d"}, {"unsupported_model_behavior": "x"}, {"session_from": "user"}),
        {"min_messages_to_cache": "1"},
    ],
)
def test_wrong_arguments_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        PagedLLMPromptCachingMiddleware(**wrong)


def test_each_turn_computes_its_new_tokens_only(tiny_engine: LocalEngine) -> None:
    """An agent of six turns: what a turn had computed is there for the next."""
    model = ChatPagedLLM(engine=tiny_engine, temperature=0, max_tokens=6, ignore_eos=False)
    middleware = PagedLLMPromptCachingMiddleware()
    agent = create_agent(model, middleware=[middleware], checkpointer=InMemorySaver(), system_prompt="Be brief. " * 8)
    block_size = tiny_engine.model_info().block_size
    prompt_tokens = 0
    for turn in range(6):
        usage = ask(agent, f"the cache {turn}")["messages"][-1].usage_metadata
        assert usage["input_token_details"]["cache_read"] >= prompt_tokens - block_size
        assert usage["input_tokens"] > prompt_tokens
        prompt_tokens = usage["input_tokens"]
