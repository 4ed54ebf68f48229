"""Cache hints: from LangChain's words for them to the engine's, and back as outcomes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from served_engine import served

from langchain_pagedllm import ChatPagedLLM, PagedLLM
from langchain_pagedllm.messages import to_chat
from pagedllm.api import Retain
from pagedllm.errors import InvalidRequestError
from pagedllm.local import LocalEngine

BOTH = pytest.mark.parametrize("cls", [ChatPagedLLM, PagedLLM])
EPHEMERAL = {"type": "ephemeral"}
LONG = "The lamp keeper of Orrin wrote the weather down three times a day, and kept the lamp. " * 4


def marked(text: str, **marker: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **(marker or {"cache_control": EPHEMERAL})}


@pytest.fixture(params=["local", "remote"])
def models(request: pytest.FixtureRequest, tiny_engine: LocalEngine) -> Iterator[dict[str, Any]]:
    """What makes a model over the tiny engine, in this process or behind a URL."""
    if request.param == "local":
        yield {"engine": tiny_engine, "temperature": 0, "max_tokens": 4}
        return
    with served(tiny_engine) as url:
        yield {"base_url": url, "temperature": 0, "max_tokens": 4}


# --- From messages to places ---


@pytest.mark.parametrize(
    ("marker", "ttl_s"),
    [
        ({"cache_control": EPHEMERAL}, 300),
        ({"cache_control": {"type": "ephemeral", "ttl": "5m"}}, 300),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, 3600),
        ({"cache_control": {"type": "ephemeral", "ttl": 7.5}}, 7.5),
        ({"extras": {"cache_control": {"type": "ephemeral", "ttl": "1h"}}}, 3600),
        ({"prompt_cache_breakpoint": {"mode": "explicit"}}, 300),
    ],
)
def test_words_for_a_breakpoint(marker: dict[str, Any], ttl_s: float) -> None:
    chat = to_chat([SystemMessage([marked("abc", **marker), marked("de", id="x")])])
    assert chat.retain == (Retain(message_index=0, num_chars=3, ttl_s=ttl_s),)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"type": "persistent"}, {"type": "ephemeral", "ttl": "2d"}, {"type": "ephemeral", "ttl": True}, "ephemeral"),
        *({"type": "ephemeral", "for": 3}, {"type": "ephemeral", "ttl": -1}, {"type": "ephemeral", "ttl": ["5m"]}),
    ],
)
def test_wrong_marker_is_named(wrong: Any, chat: ChatPagedLLM) -> None:
    """A typing error that is ignored would show only as a cache that does not hit."""
    with pytest.raises(InvalidRequestError, match=r"cache_control|ttl_s"):
        chat.invoke([HumanMessage([marked("x", cache_control=wrong)])])
    with pytest.raises(InvalidRequestError, match=r"cache_control|ttl_s"):
        chat.invoke("x", cache_control=wrong)


def test_wrong_hints_are_refused_when_a_model_is_built(engine: FakeEngine) -> None:
    for name, value in (("prompt_cache_key", ""), ("priority", 2**40), ("cache_control", {"type": "x"})):
        with pytest.raises(ValueError, match=f"{name}|prefix_key"):
            ChatPagedLLM(engine=engine, **{name: value})


_TEXTS = st.text(alphabet="ab\n", max_size=3)
_PARTS = st.lists(
    st.one_of(
        _TEXTS,
        st.builds(lambda text: {"type": "text", "text": text}, _TEXTS),
        st.builds(lambda text, mark: marked(text + mark), _TEXTS, st.sampled_from(["!"])),
        st.just({"type": "thinking", "thinking": "hm"}),
    ),
    max_size=4,
)
_MESSAGES = st.lists(
    st.one_of(
        st.builds(SystemMessage, _PARTS),
        st.builds(HumanMessage, _PARTS),
        st.builds(AIMessage, _PARTS),
        st.builds(lambda parts: ToolMessage(parts, tool_call_id="a"), _PARTS),
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None)
@given(_MESSAGES)
def test_each_place_is_where_its_part_ends(messages: list[BaseMessage]) -> None:
    """Places counted before neighbours are joined would keep the wrong part of a prompt."""
    chat = to_chat(messages)
    # A marked part ends with the only "!" of its text, and no other part has one.
    ends = [
        (index, position + 1)
        for index, message in enumerate(chat.messages)
        for position, char in enumerate(message.content)
        if char == "!"
    ]
    assert [(place.message_index, place.num_chars) for place in chat.retain] == ends


def test_markers_survive_templates_and_history(engine: FakeEngine, chat: ChatPagedLLM) -> None:
    system = SystemMessage([marked("Answer from this."), marked("{no variable}", id="1")])
    prompt = ChatPromptTemplate.from_messages([system, ("human", "{question}")])
    (prompt | chat).invoke({"question": "Why?"})
    [place] = engine.requests[-1].hints.retain
    assert (place.message_index, place.num_chars) == (0, len("Answer from this."))


# --- Fields and call options ---


@BOTH
def test_fields_and_options_become_hints(cls: Any, engine: FakeEngine) -> None:
    model = cls(engine=engine, cache_salt="a", prompt_cache_key="k", priority=3)
    model.invoke("Hello")
    hints = engine.requests[-1].hints
    assert (hints.salt, hints.prefix_key, hints.priority, hints.retain) == ("a", "k", 3, ())
    model.invoke("Hello", cache_salt="b", prompt_cache_key="l", priority=0, cache_control=EPHEMERAL)
    hints = engine.requests[-1].hints
    assert (hints.salt, hints.prefix_key, hints.priority, hints.retain) == ("b", "l", 0, (Retain(ttl_s=300),))


def test_response_cache_ignores_what_changes_no_answer(engine: FakeEngine) -> None:
    """A priority in the key would let the cache miss; a salt that is not in it would mix tenants."""
    chat = ChatPagedLLM(engine=engine, cache=InMemoryCache())
    for options in ({}, {"priority": 1}, {"prompt_cache_key": "k"}, {"cache_control": EPHEMERAL}, {"timeout": 60}):
        chat.invoke("Hello", **options)
    assert len(engine.requests) == 1
    chat.invoke("Hello", cache_salt="a")
    chat.invoke("Hello", cache_salt="b")
    chat.invoke("Hello", cache_salt="b")
    assert len(engine.requests) == 3


def test_a_salt_never_reaches_a_trace(chat: ChatPagedLLM) -> None:
    class Start(BaseCallbackHandler):
        seen = ""

        def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
            Start.seen += str((serialized, kwargs))

    chat.invoke("Hello", cache_salt="tenant-7", config={"callbacks": [Start()]})
    assert "cache_salt_sha256" in Start.seen
    assert "tenant-7" not in Start.seen


# --- Outcomes ---


async def test_outcomes_come_back(models: dict[str, Any]) -> None:
    """A hint whose fate nobody learns cannot be told from one that is ignored."""
    chat = ChatPagedLLM(**models)
    plain = chat.invoke([SystemMessage(LONG), HumanMessage("And?")])
    messages = [SystemMessage([marked(LONG)]), HumanMessage("And?")]
    streamed = None
    async for chunk in chat.astream(messages, priority=2):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    for answer in (chat.invoke(messages, priority=2), await chat.ainvoke(messages, priority=2), streamed):
        assert answer.text == plain.text
        usage, outcomes = answer.usage_metadata, answer.response_metadata["prefix_cache"]["hints"]
        assert usage is not None
        assert sorted(outcome["hint"] for outcome in outcomes) == ["priority", "retain"]
        by_hint = {outcome["hint"]: outcome for outcome in outcomes}
        assert by_hint["retain"]["outcome"] == "accepted"
        assert 0 < by_hint["retain"]["num_tokens"] <= usage["input_tokens"]
        assert by_hint["priority"]["outcome"] == "rejected"
        assert "fcfs" in by_hint["priority"]["reason"]


def test_created_and_read_tokens(models: dict[str, Any]) -> None:
    """LangChain's counters take both for parts of the input; whoever pays by them must not pay twice."""
    chat = ChatPagedLLM(**models)
    first, second = (chat.invoke(LONG, cache_salt="s") for _ in range(2))
    details = [answer.usage_metadata["input_token_details"] for answer in (first, second)]  # type: ignore[index]
    assert details[0]["cache_read"] == 0
    assert details[0]["cache_creation"] == details[1]["cache_read"] > 0
    assert details[1]["cache_creation"] == 0
    for answer, detail in zip((first, second), details, strict=True):
        assert sum(detail.values()) <= answer.usage_metadata["input_tokens"]  # type: ignore[index]
        cache = answer.response_metadata["prefix_cache"]
        assert (cache["cached_tokens"], cache["created_tokens"]) == (detail["cache_read"], detail["cache_creation"])


@BOTH
async def test_warm_match_and_stats(cls: Any, models: dict[str, Any]) -> None:
    """A prefix that is warmed as something else than what is asked later would never hit."""
    model = cls(**models)
    prefix: Any = [SystemMessage(LONG), HumanMessage("The lamp.")] if cls is ChatPagedLLM else LONG
    asked: Any = [*prefix, AIMessage("Yes."), HumanMessage("Why?")] if cls is ChatPagedLLM else LONG + " Why?"
    assert model.match_prefix(prefix) == 0
    warmed = model.warm_prefix(prefix)
    assert warmed.cached_tokens == 0
    assert [outcome.outcome for outcome in warmed.hints] == ["accepted"]
    matched = model.match_prefix(asked)
    assert warmed.prompt_tokens - 32 < matched <= warmed.prompt_tokens
    assert await model.amatch_prefix(asked) == matched
    assert model.match_prefix(asked, cache_salt="other") == 0
    before = model.cache_stats()
    answer = model.generate([asked])
    after = await model.acache_stats()
    assert after.prefix_hits - before.prefix_hits == matched
    assert answer.generations[0][0].generation_info["prefix_cache"]["cached_tokens"] == matched
    again = await model.awarm_prefix(prefix, cache_control={"type": "ephemeral", "ttl": "1h"})
    assert again.cached_tokens > 0
    assert {outcome.hint: outcome.outcome for outcome in again.hints} == {"retain": "accepted", "warm": "accepted"}


def test_no_two_loops_or_threads_in_the_way(models: dict[str, Any]) -> None:
    """Two event loops in a row over one model."""
    chat = ChatPagedLLM(**models)
    assert asyncio.run(chat.awarm_prefix(LONG)).prompt_tokens == asyncio.run(chat.awarm_prefix(LONG)).prompt_tokens


def test_too_many_breakpoints_are_named(chat: ChatPagedLLM) -> None:
    with pytest.raises(InvalidRequestError, match="retain=17: must be at most 16"):
        chat.invoke([HumanMessage([marked(str(number)) for number in range(17)])])


@BOTH
def test_unknown_option_of_a_prefix_is_named(cls: Any, engine: FakeEngine) -> None:
    with pytest.raises(InvalidRequestError, match="unknown option 'ttl'"):
        cls(engine=engine).warm_prefix("x", ttl=3)
