"""A RAG chain that streams from the engine in this process, and what the prefix cache saves when a question comes back.

BM25 finds four documents, the prompt puts them before the question, the answer is printed as it is generated. Three
questions are asked twice: the second time the KV of their prompts is still in the engine's blocks.

The last line on stdout is one JSON object with the figures of the table above it.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnablePassthrough
from pydantic import PrivateAttr
from rank_bm25 import BM25Okapi

from langchain_pagedllm import ChatPagedLLM

CORPUS = Path(__file__).with_name("corpus.jsonl")
QUESTIONS = (
    "When did the first train cross Tarn Pass?",
    "How long is Fennick Tunnel?",
    "How high is the blade of the snow plough?",
)
# What stays the same comes first and the question last: the engine reuses KV from the start of a prompt up to the
# first token that differs, in whole blocks.
PROMPT = ChatPromptTemplate.from_messages(
    [
        (
            "system",
            "Answer the passenger's question about the Tarn Pass Railway from the documents, in one or two sentences.",
        ),
        ("human", "Documents:\n\n{documents}\n\nQuestion: {question}"),
    ]
)


class BM25Retriever(BaseRetriever):
    """Finds the ``k`` documents that share the most telling words with a question."""

    documents: list[Document]
    k: int = 4
    _index: BM25Okapi = PrivateAttr()

    def model_post_init(self, _context: Any, /) -> None:
        self._index = BM25Okapi([_words(_as_text(document)) for document in self.documents])

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,  # noqa: ARG002 (LangChain looks for the name)
    ) -> list[Document]:
        scores = self._index.get_scores(_words(query))
        # Equal scores keep the order of the corpus, so that a question always gets the same prompt.
        ranked = sorted(range(len(scores)), key=lambda position: -scores[position])
        return [self.documents[position] for position in ranked[: self.k]]


class UsageCollector(BaseCallbackHandler):
    """Keeps the token counts of a model call, which ``StrOutputParser`` drops from the stream."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cache_read = 0

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        usage = response.generations[0][0].message.usage_metadata
        self.prompt_tokens = usage["input_tokens"]
        self.completion_tokens = usage["output_tokens"]
        self.cache_read = usage.get("input_token_details", {}).get("cache_read", 0)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one answer took; ``tokens_per_second`` leaves the first token out, which ``ttft_ms`` stands for."""

    ttft_ms: float
    tokens_per_second: float
    prompt_tokens: int
    cache_read: int
    chunks: int


def load_corpus(path: Path = CORPUS) -> list[Document]:
    """Read one document a line: ``{"id", "title", "text"}``."""
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [Document(id=row["id"], page_content=row["text"], metadata={"title": row["title"]}) for row in rows]


def build_chain(retriever: BaseRetriever, model: BaseChatModel) -> Runnable[str, str]:
    """Question in, pieces of the answer out."""
    context = {"documents": retriever | _join, "question": RunnablePassthrough()}
    return context | PROMPT | model | StrOutputParser()


def ask(chain: Runnable[str, str], question: str) -> Measurement:
    """Print the answer while it is generated and time it."""
    print(f"\nQ: {question}\nA: ", end="", flush=True)
    usage = UsageCollector()
    arrivals = []
    start = time.perf_counter()
    for piece in chain.stream(question, config={"callbacks": [usage]}):
        if piece:
            arrivals.append(time.perf_counter())
            print(piece, end="", flush=True)
    print()
    seconds = arrivals[-1] - arrivals[0]
    return Measurement(
        ttft_ms=round((arrivals[0] - start) * 1000, 1),
        tokens_per_second=round((usage.completion_tokens - 1) / seconds, 1) if seconds else 0.0,
        prompt_tokens=usage.prompt_tokens,
        cache_read=usage.cache_read,
        chunks=len(arrivals),
    )


def print_table(measurements: Sequence[Measurement], load_s: float) -> None:
    """One row an answer, then the medians of both rounds and the memory."""
    print("\nround  question  TTFT ms  tokens/s  prompt tokens  cached  chunks")
    half = len(measurements) // 2
    for position, row in enumerate(measurements):
        print(
            f"{position // half + 1:5}  {position % half + 1:8}  {row.ttft_ms:7.1f}  {row.tokens_per_second:8.1f}"
            f"  {row.prompt_tokens:13}  {row.cache_read:6}  {row.chunks:6}"
        )
    first, second = (
        statistics.median(row.ttft_ms for row in part) for part in (measurements[:half], measurements[half:])
    )
    print(f"median TTFT {first:.1f} ms, then {second:.1f} ms: {first / second:.1f} times as fast")
    print(f"start and warm-up {load_s:.1f} s, peak memory {_peak_memory_mib():.0f} MiB\n")


def main() -> None:
    """Ask every question twice and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="name or path (default: $PAGEDLLM_MODEL, else the embedded model)")
    parser.add_argument("--max-tokens", type=int, default=64, help="most tokens of an answer (default: %(default)s)")
    options = parser.parse_args()

    start = time.perf_counter()
    named = {"model": options.model} if options.model else {}
    model = ChatPagedLLM(temperature=0, max_tokens=options.max_tokens, **named)
    # The first call loads the model. Its prompt shares no block with those of the questions.
    model.invoke("Hello!", max_tokens=4)
    load_s = round(time.perf_counter() - start, 2)

    chain = build_chain(BM25Retriever(documents=load_corpus()), model)
    measurements = [ask(chain, question) for _ in range(2) for question in QUESTIONS]
    print_table(measurements, load_s)
    report = {"questions": len(measurements)}
    for name in ("ttft_ms", "tokens_per_second", "prompt_tokens", "cache_read", "chunks"):
        report[name] = [getattr(row, name) for row in measurements]
    print(json.dumps(report | {"load_s": load_s}))


def _as_text(document: Document) -> str:
    return f"{document.metadata['title']}\n{document.page_content}"


def _join(documents: Sequence[Document]) -> str:
    return "\n\n".join(_as_text(document) for document in documents)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _peak_memory_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # bytes there, KiB elsewhere


if __name__ == "__main__":
    main()
