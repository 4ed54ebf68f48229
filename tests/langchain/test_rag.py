"""RAG prompts that hit the prefix cache: the prompt, the order of its documents, the chain."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.runnables import RunnableLambda
from rag_workload import by_greedy, by_popularity, make_questions, num_shared

from langchain_pagedllm import CacheAwareDocumentOrder, ChatPagedLLM, PrefixStableRAGPrompt, create_paged_rag_chain
from langchain_pagedllm.document_tree import DocumentTree
from pagedllm.errors import ConfigError, InvalidRequestError
from pagedllm.local import LocalEngine

A, B, C, D, E = DOCUMENTS = [Document(id=name, page_content=f"Text of {name}. " * 8) for name in "abcde"]


def names(documents: Sequence[Document]) -> str:
    return "".join(document.id or "?" for document in documents)


# --- The prompt ---


def test_what_stays_comes_first_and_breakpoints_follow_it() -> None:
    prompt = PrefixStableRAGPrompt("Answer.", volatile="It is {day}.", ttl="1h")
    system, user = prompt.invoke({"documents": [A, B], "question": "Why?", "day": "Monday"}).to_messages()
    assert isinstance(system, SystemMessage)
    assert isinstance(user, HumanMessage)
    assert (
        user.text.index("Text of a") < user.text.index("Text of b") < user.text.index("It is Monday.\nQuestion: Why?")
    )
    assert user.text.endswith("Question: Why?")
    marks = [[part.get("cache_control") for part in message.content] for message in (system, user)]
    control = {"type": "ephemeral", "ttl": "1h"}
    assert marks == [[control], [None, control, None]]


def test_without_ttl_there_are_no_breakpoints() -> None:
    prompt = PrefixStableRAGPrompt("Answer.", ttl=None)
    for message in prompt.format_messages(documents=[A], question="Why?"):
        assert all("cache_control" not in part for part in message.content)


def test_no_document_is_no_error() -> None:
    [_, user] = PrefixStableRAGPrompt("Answer.").format_messages(documents=[], question="Why?")
    assert user.text == "Question: Why?"


@pytest.mark.parametrize(
    ("options", "error"),
    [({"ttl": "2d"}, InvalidRequestError), ({"question": " Q: {question}"}, ConfigError)],
)
def test_wrong_prompt_is_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        PrefixStableRAGPrompt("Answer.", **options)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text(alphabet="ab<>\n \t/é{.", max_size=12), min_size=2, max_size=4), st.data())
def test_a_documents_tokens_do_not_depend_on_its_neighbours(texts: list[str], data: st.DataObject) -> None:
    """A document that melts into the next one's first token is another document for the cache."""
    from conftest import SMOLLM2_FLOAT32

    from pagedllm.files.locate import locate_model
    from pagedllm.text.tokenizer import load_tokenizer

    tokenizer = _TOKENIZERS.setdefault("smollm2", None) or load_tokenizer(locate_model(SMOLLM2_FLOAT32.model))
    _TOKENIZERS["smollm2"] = tokenizer
    prompt = PrefixStableRAGPrompt("Answer.")

    def tokens(order: Sequence[str]) -> list[int]:
        [_, user] = prompt.format_messages(documents=[Document(text) for text in order], question="Why?")
        return tokenizer.encode(user.text, add_special_tokens=False)

    alone = [tokens([text]) for text in texts]
    end = tokens([])
    order = data.draw(st.permutations(range(len(texts))))
    bodies = [ids[: len(ids) - len(end)] for ids in alone]
    assert tokens([texts[index] for index in order]) == [*itertools.chain(*(bodies[index] for index in order)), *end]


_TOKENIZERS: dict[str, Any] = {}


# --- The order ---


def test_modes() -> None:
    assert names(CacheAwareDocumentOrder("off").invoke([C, A, B])) == "cab"
    stable = CacheAwareDocumentOrder("stable")
    assert names(stable.invoke([C, A, B])) == names(stable.invoke([B, A, C])) == "abc"
    tree = CacheAwareDocumentOrder("tree")
    assert names(tree.invoke([C, A])) == "ca"
    arranged = tree.arrange([D, A, C, B])
    assert names(arranged.documents) == "cadb"
    assert (arranged.ranks, arranged.num_shared, arranged.max_displacement) == ((2, 1, 0, 3), 2, 2)
    assert names(tree.transform_documents([A, B, C])) == "cab"


async def test_async_gives_the_same() -> None:
    one, other = CacheAwareDocumentOrder(), CacheAwareDocumentOrder(confirm=len)
    for documents in ([C, A], [D, A, C, B], [E, A]):
        want = names(one.invoke(documents))
        assert names(await other.ainvoke(documents)) == want
    assert names(await one.atransform_documents([A, C])) == names(await other.atransform_documents([A, C]))


_SETS = st.lists(st.lists(st.sampled_from([*DOCUMENTS, Document(id="a", page_content="Other text.")])), max_size=12)


@settings(deadline=None)
@given(
    _SETS,
    st.sampled_from(["off", "stable", "tree"]),
    st.one_of(st.none(), st.integers(0, 3)),
    st.integers(0, 3),
    st.one_of(st.none(), st.integers(0, 4)),
)
def test_nothing_is_dropped_changed_or_moved_too_far(
    sets: list[list[Document]], mode: Any, limit: int | None, num_kept: int, num_cached: int | None
) -> None:
    """Also with documents that come twice, one id with two texts, and an engine that has lost what it had."""
    confirm = None if num_cached is None else lambda path: min(num_cached, len(path))
    order = CacheAwareDocumentOrder(
        mode, max_displacement=limit, keep_at_edge=num_kept, confirm=confirm, max_remembered=4
    )
    for documents in sets:
        before = [document.model_copy(deep=True) for document in documents]
        arranged = order.arrange(documents)
        assert sorted(arranged.ranks) == list(range(len(documents)))
        assert list(arranged.documents) == [documents[rank] for rank in arranged.ranks]
        assert documents == before
        if mode == "off":
            assert list(arranged.documents) == documents
            continue
        kept = min(num_kept, len(documents))
        assert list(arranged.ranks[len(documents) - kept :]) == list(range(kept))[::-1]
        if limit is not None:
            moved = arranged.ranks[: len(documents) - kept]
            assert all(abs(rank - kept - place) <= limit for place, rank in enumerate(moved))


def test_what_the_engine_lost_is_not_counted_on() -> None:
    """A tree that believes in evicted prefixes moves documents about for nothing."""
    cached = {"n": 9}
    order = CacheAwareDocumentOrder(confirm=lambda path: min(cached["n"], len(path)))
    order.invoke([A, B])
    assert order.arrange([C, B, A]).num_confirmed == 2
    cached["n"] = 0
    arranged = order.arrange([C, B, A])
    assert (arranged.num_shared, arranged.num_confirmed) == (0, 0)


def test_forgotten_orders_leave_nothing_behind() -> None:
    tree = DocumentTree(2)
    for keys in ([b"a", b"b"], [b"a", b"c"], [b"d"]):
        tree.add(keys)
    assert tree.walk([b"b", b"a"], [1, 1], lambda place, left: left) == [1]
    assert tree.popularity(b"b") == 0
    tree.add([b"e"])
    assert tree.walk([b"a", b"c"], [1, 1], lambda place, left: left) == []


@pytest.mark.parametrize("seed", range(5))
def test_tree_against_oracles(seed: int) -> None:
    """200 questions over 60 documents, by Zipf's law: 1.8 times the shared documents of the retriever's order, and 85 %
    of what the better of two orders has that know more than any order can."""
    texts = [Document(id=str(number), page_content="x" * 100, metadata={"mayor": ""}) for number in range(60)]
    trace = [question.found for question in make_questions(texts, 200, seed=seed)]
    tree = CacheAwareDocumentOrder()
    served = [[int(item.id or -1) for item in tree.invoke([texts[number] for number in found])] for found in trace]
    best = max(num_shared(by_greedy(trace)), num_shared(by_popularity(trace)))
    assert num_shared(served) >= 1.8 * num_shared(trace)
    assert num_shared(served) >= 0.85 * best


def test_threads_share_an_order() -> None:
    order = CacheAwareDocumentOrder(max_remembered=8)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(200):
                assert len(order.invoke(rng.sample(DOCUMENTS, 4))) == 4
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize(
    "wrong", [{"mode": "best"}, {"max_displacement": -1}, {"keep_at_edge": True}, {"max_remembered": 0}]
)
def test_wrong_argument_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CacheAwareDocumentOrder(**wrong)


# --- The chain ---


def retriever(found: dict[str, list[Document]]) -> Any:
    return RunnableLambda(lambda question: found[question])


async def test_chain(engine: FakeEngine, chat: ChatPagedLLM) -> None:
    found = {"one?": [A, B], "two?": [C, B, A]}
    chain = create_paged_rag_chain(retriever(found), chat)
    first = chain.invoke("one?")
    assert set(first) == {"question", "documents", "order", "answer"}
    assert isinstance(first["answer"], str)
    second = await chain.ainvoke({"question": "two?"})
    assert names(second["documents"]) == "abc"
    assert (second["order"].num_shared, second["order"].num_confirmed) == (2, 2)
    # The last request was asked with two breakpoints, and found both documents.
    request = engine.requests[-1]
    assert [place.message_index for place in request.hints.retain] == [0, 1]
    pieces = list(chain.stream("one?"))
    assert "".join(piece.get("answer", "") for piece in pieces) == first["answer"]
    assert sum("answer" in piece for piece in pieces) > 2


def test_chain_asks_the_engine(tiny_engine: LocalEngine) -> None:
    """What was evicted or reset is looked for in vain, and the order begins anew."""
    model = ChatPagedLLM(engine=tiny_engine, temperature=0, max_tokens=2)
    chain = create_paged_rag_chain(retriever({"one?": [A, B], "two?": [C, B, A]}), model)
    chain.invoke("one?")
    assert chain.invoke("two?")["order"].num_confirmed == 2
    tiny_engine.reset_prefix_cache()
    arranged = chain.invoke("two?")["order"]
    assert (arranged.num_shared, arranged.num_confirmed) == (0, 0)


def test_chain_with_an_order_of_ones_own(chat: ChatPagedLLM) -> None:
    order = CacheAwareDocumentOrder("stable")
    chain = create_paged_rag_chain(retriever({"one?": [C, A, B]}), chat, "Be brief.", order=order)
    assert names(chain.invoke("one?")["documents"]) == "abc"
