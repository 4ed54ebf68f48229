"""The cookbook about the order of documents, at its full size over a tiny model, and its plot."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rag_reuse
import rag_workload
from conftest import TinyModel
from fake_engine import FakeEngine

from langchain_pagedllm import ChatPagedLLM

FULL = rag_reuse.Plan(num_questions=200, num_documents=60, doc_tokens=256, num_found=5, max_tokens=1)


@pytest.fixture
def model() -> ChatPagedLLM:
    """What is cached does not depend on weights. A token is a character, a block has 16."""
    return ChatPagedLLM(engine=FakeEngine(), temperature=0)


def test_full_size(model: ChatPagedLLM) -> None:
    """An order that finds less in the engine than it counts on, or takes longer than the KV that it saves."""
    plan = dataclasses.replace(FULL, orders=("off", "tree"))
    report = rag_reuse.summarize(plan, rag_reuse.run(model, plan))
    rows = report["orders"]
    assert rows["tree"]["cached_document_tokens"] >= 1.8 * rows["off"]["cached_document_tokens"]
    assert rows["tree"]["of_best_oracle"] >= 0.85
    # Of each document that the orders share the engine has all but, at the last one, part of a block.
    for row in rows.values():
        shared = row["shared_documents"] * FULL.doc_tokens
        assert shared - 16 * FULL.num_questions <= row["cached_document_tokens"] <= 1.15 * shared


def test_each_order_has_a_cache_of_its_own(model: ChatPagedLLM) -> None:
    """Orders that find each other's prompts would all look alike."""
    plan = dataclasses.replace(FULL, num_questions=1, doc_tokens=64, orders=("off", "tree", "shuffle-1"), seed=1)
    answers = rag_reuse.run(model, plan)
    assert [answers[name].cached_tokens for name in plan.orders] == [[0]] * 3
    [off], [shuffled] = answers["off"].served, answers["shuffle-1"].served
    assert off != shuffled
    assert sorted(off) == sorted(shuffled)


def test_small_pool_is_an_error(tiny_model: TinyModel) -> None:
    """Figures of a cache that forgets would be called those of one that does not."""
    plan = rag_reuse.Plan(num_questions=3, num_found=2, doc_tokens=64, max_tokens=1)
    size = 512 * 3 * 2 * 2 * 16 * 4  # 512 tokens in three layers with two heads of 16, K and V, in float32
    with tiny_model.engine(kv_cache_memory_bytes=size) as engine, pytest.raises(SystemExit, match="too small"):
        rag_reuse.run(ChatPagedLLM(engine=engine, temperature=0), plan)


def test_report_and_plot(model: ChatPagedLLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = rag_reuse.Plan(max_tokens=2)
    answers = rag_reuse.run(model, plan, log=tmp_path / "log.jsonl")
    report = rag_reuse.summarize(plan, answers)
    rag_reuse.print_table(report)
    table = capsys.readouterr().out
    for name in (*rag_reuse.ORDERS, "greedy", "popularity"):
        assert f"\n{name} " in table
    rag_reuse.plot(tmp_path / "plot.png", report, answers)
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["tree"]["cached"] for line in lines] == answers["tree"].cached_tokens
    json.dumps(report)


def test_corpus_is_as_planned(model: ChatPagedLLM) -> None:
    """Documents of other lengths, or questions that two visitors share, would measure something else."""
    corpus = rag_reuse.Corpus(model, FULL)
    engine: Any = model._get_engine()
    lengths = {len(engine.tokenize(item.page_content, add_special_tokens=False)) for item in corpus.documents}
    assert lengths == {256}
    assert len({question.text for question in corpus.questions}) == 200
    assert all(len(set(question.found)) == 5 for question in corpus.questions)
    uses = [0] * 60
    for number in itertools.chain.from_iterable(question.found for question in corpus.questions):
        uses[number] += 1
    assert uses[0] > 3 * statistics.median(uses)


def test_gold_is_in_one_document_of_each_question() -> None:
    """A question that two documents answer, or none, says nothing about the order."""
    documents = rag_workload.make_documents(60, lambda text: text)
    for question in rag_workload.make_questions(documents, 50):
        holders = [number for number, item in enumerate(documents) if question.gold in item.page_content]
        assert len(holders) == 1
        assert holders[0] in question.found


def test_too_many_documents_are_refused() -> None:
    with pytest.raises(ValueError, match="60"):
        rag_workload.make_documents(61, lambda text: text)


@pytest.mark.model
def test_script() -> None:
    """The file as its users run it, at its smallest."""
    size = ["--questions", "2", "--documents", "4", "--doc-tokens", "16", "--found", "2", "--max-tokens", "2"]
    run = subprocess.run(
        [sys.executable, rag_reuse.__file__, *size, "--kv-gib", "0.25"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    assert list(report["orders"]) == list(rag_reuse.ORDERS)
    assert all(row["ttft_ms"] > 0 for row in report["orders"].values())
