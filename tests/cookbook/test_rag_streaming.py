"""The job that users see first: ``make demo``."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "cookbook" / "rag_streaming.py"
EVIDENCE = ("first-train", "fennick-tunnel", "snow-plough")
PER_QUESTION = ("ttft_ms", "tokens_per_second", "prompt_tokens", "cache_read", "chunks")


@pytest.fixture(scope="module")
def rag() -> ModuleType:
    # The cookbook is a folder of scripts, not a package.
    spec = importlib.util.spec_from_file_location("rag_streaming", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_corpus_is_short_documents_with_unique_ids(rag: ModuleType) -> None:
    """Long or doubled documents would change what the table of the demo shows."""
    documents = rag.load_corpus()
    assert 35 <= len(documents) <= 45
    assert len({document.id for document in documents}) == len(documents)
    assert all(60 <= len(document.page_content.split()) <= 120 for document in documents)


def test_retriever_finds_the_document_with_the_answer(rag: ModuleType) -> None:
    """A question whose answer is not in the prompt would make the model look wrong."""
    retriever = rag.BM25Retriever(documents=rag.load_corpus())
    for question, evidence in zip(rag.QUESTIONS, EVIDENCE, strict=True):
        found = [document.id for document in retriever.invoke(question)]
        assert len(found) == 4
        assert evidence in found


def test_question_stands_after_all_documents(rag: ModuleType) -> None:
    """A question before the documents would leave nothing to reuse when only the question changes."""
    first, second = (
        rag.PROMPT.invoke({"documents": "the same text", "question": question}).to_string()
        for question in ("one?", "two?")
    )
    assert first.removesuffix("one?") == second.removesuffix("two?")


@pytest.mark.model
def test_demo_ends_with_figures_of_six_streamed_answers() -> None:
    """An answer that arrives in one piece, or a second round that computes its prompts anew."""
    run = subprocess.run(
        [sys.executable, str(SCRIPT)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])

    assert list(report) == ["questions", *PER_QUESTION, "load_s"]
    assert report["questions"] == 6
    assert all(len(report[name]) == 6 for name in PER_QUESTION)
    assert min(report["ttft_ms"]) > 0
    assert min(report["tokens_per_second"]) > 0
    assert report["load_s"] > 0
    assert min(report["chunks"]) > 5
    assert report["prompt_tokens"][:3] == report["prompt_tokens"][3:]
    for cached, prompt in zip(report["cache_read"][3:], report["prompt_tokens"][3:], strict=True):
        assert 0.8 * prompt <= cached < prompt
