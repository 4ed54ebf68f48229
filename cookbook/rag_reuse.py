"""What the order of retrieved documents does to a RAG chain: shares of cached tokens, and time to first token.

The same questions, each with five of 60 documents, go through chains that differ in the order alone, one after the
other question by question, so that a noisy machine is as noisy for all. Each order has a cache of its own, by a salt:

    off      as the retriever found them, which is what a chain without ``CacheAwareDocumentOrder`` does
    stable   by id
    tree     first what an earlier prompt began with
    shuffle-1 ...  at random: how much the answers depend on the order anyway

The defaults are small. The whole experiment takes a while on a CPU, and a KV pool that keeps every prompt:

    python cookbook/rag_reuse.py --questions 200 --documents 60 --doc-tokens 256 --found 5 --orders off,tree --kv-gib 18

What the answers are worth shows in many questions about several corpora, here with each seed from 1 to 5:

    python cookbook/rag_reuse.py --questions 150 --documents 60 --doc-tokens 96 --found 5 --max-tokens 24 --kv-gib 16 \\
        --orders off,stable,tree,shuffle-1,shuffle-2,shuffle-3 --seed 1

The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessageChunk
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from matplotlib.figure import Figure
from rag_workload import (
    INSTRUCTIONS,
    Question,
    by_greedy,
    by_popularity,
    make_documents,
    make_questions,
    num_shared,
)

from langchain_pagedllm import ChatPagedLLM, PrefixStableRAGPrompt, create_paged_rag_chain

ORDERS = ("off", "stable", "tree")
_SYSTEM_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is asked.

    Args:
        num_questions: In all, of every order.
        num_documents: In the corpus.
        doc_tokens: Of each.
        num_found: Documents for each question.
        orders: ``off``, ``stable``, ``tree``, and ``shuffle-N``, a permutation by seed N.
        max_tokens: Of an answer.
        seed: Of documents and questions.
    """

    num_questions: int = 6
    num_documents: int = 8
    doc_tokens: int = 48
    num_found: int = 3
    orders: tuple[str, ...] = ORDERS
    max_tokens: int = 8
    seed: int = 0


@dataclass(kw_only=True)
class Answers:
    """What one order's chain did, question by question.

    Args:
        served: The documents as they stood in the prompt, by number.
        cached_tokens: Document tokens whose KV was cached; the system's message does not count.
        ttft_s: From the question to the first piece of the answer: retrieving, ordering and asking the engine included.
        ordering_s: Of that, ordering.
        is_gold: Whether the answer contains what a right one does.
    """

    served: list[tuple[int, ...]] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    ordering_s: list[float] = field(default_factory=list)
    is_gold: list[bool] = field(default_factory=list)


class Corpus:
    """Documents of the plan's length, and what a retriever finds among them."""

    def __init__(self, model: ChatPagedLLM, plan: Plan) -> None:
        engine = model._get_engine()

        def fit(text: str, num_tokens: int) -> str:
            return engine.detokenize(engine.tokenize(text, add_special_tokens=False)[:num_tokens])

        self.instructions = fit(INSTRUCTIONS, _SYSTEM_TOKENS)
        self.documents = make_documents(plan.num_documents, lambda text: fit(text, plan.doc_tokens), seed=plan.seed)
        self.questions = make_questions(self.documents, plan.num_questions, num_found=plan.num_found, seed=plan.seed)
        self.numbers = {document.id: number for number, document in enumerate(self.documents)}

    def retriever(self, seed: int | None = None) -> Runnable[str, list[Document]]:
        """From a question to its documents; with a seed, in random order."""
        rng = random.Random(seed)
        found = {}
        for question in self.questions:
            numbers = rng.sample(question.found, len(question.found)) if seed is not None else question.found
            found[question.text] = [self.documents[number] for number in numbers]
        return RunnableLambda(found.__getitem__, name="retrieve")


def run(model: ChatPagedLLM, plan: Plan, *, log: Path | None = None) -> dict[str, Answers]:
    """Ask every question with every order.

    Args:
        log: Gets a line of JSON after each question.

    Raises:
        SystemExit: The KV pool was too small to keep everything.
    """
    corpus = Corpus(model, plan)
    prompt = PrefixStableRAGPrompt(corpus.instructions)
    chains = {}
    for name in plan.orders:
        salted = model.model_copy(update={"cache_salt": f"rag-{name}", "max_tokens": plan.max_tokens})
        salted.warm_prefix(prompt.prefix_messages([]))
        seed = int(name.removeprefix("shuffle-")) if name.startswith("shuffle-") else None
        mode: Any = "off" if seed is not None else name
        # The message itself, instead of its text: it has the usage.
        chains[name] = create_paged_rag_chain(
            corpus.retriever(seed), salted, prompt, order=mode, output_parser=RunnablePassthrough()
        )
    head_tokens = model.get_num_tokens_from_messages(prompt.prefix_messages([]))
    num_evictions = model.cache_stats().num_evictions
    answers = {name: Answers() for name in plan.orders}
    for number, question in enumerate(corpus.questions):
        # Nobody is always first.
        turn = number % len(plan.orders)
        for name in (*plan.orders[turn:], *plan.orders[:turn]):
            _ask(chains[name], question, head_tokens, corpus, answers[name])
        if log is not None:
            with log.open("a", encoding="utf-8") as file:
                print(json.dumps({"question": number} | _last(answers)), file=file)
    if model.cache_stats().num_evictions > num_evictions:
        raise SystemExit("the KV pool is too small to keep all prompts: ask fewer questions, or fewer orders at a time")
    return answers


def _ask(chain: Runnable[Any, Any], question: Question, head_tokens: int, corpus: Corpus, into: Answers) -> None:
    start = time.perf_counter()
    ttft_s = 0.0
    answer: AIMessageChunk | None = None
    for piece in chain.stream(question.text):
        if "order" in piece:
            arrangement = piece["order"]
        if "answer" in piece:
            ttft_s = ttft_s or time.perf_counter() - start
            answer = piece["answer"] if answer is None else answer + piece["answer"]
    assert answer is not None
    assert answer.usage_metadata is not None
    cached_tokens = answer.usage_metadata["input_token_details"]["cache_read"]
    into.served.append(tuple(corpus.numbers[document.id] for document in arrangement.documents))
    into.cached_tokens.append(max(0, cached_tokens - head_tokens))
    into.ttft_s.append(ttft_s)
    into.ordering_s.append(arrangement.seconds)
    into.is_gold.append(question.gold.lower() in answer.text.lower())


def _last(answers: dict[str, Answers]) -> dict[str, Any]:
    return {
        name: {"ttft_s": item.ttft_s[-1], "cached": item.cached_tokens[-1], "gold": item.is_gold[-1]}
        for name, item in answers.items()
    }


def summarize(plan: Plan, answers: dict[str, Answers]) -> dict[str, Any]:
    """Figures of all orders, and those of two that nobody can have: of who knows the whole trace, and of who tries all
    permutations. Theirs are in whole documents, of an endless cache."""
    first = next(iter(answers.values()))
    found = [tuple(sorted(served)) for served in first.served]
    num_documents = plan.num_questions * plan.num_found
    oracles = {"greedy": num_shared(by_greedy(found)), "popularity": num_shared(by_popularity(found))}
    best = max(oracles.values())
    report: dict[str, Any] = {"questions": plan.num_questions, "orders": {}}
    for name, item in answers.items():
        report["orders"][name] = {
            "cached_document_tokens": sum(item.cached_tokens),
            "cached_share": round(sum(item.cached_tokens) / (num_documents * plan.doc_tokens), 4),
            "shared_documents": num_shared(item.served),
            "of_best_oracle": round(num_shared(item.served) / best, 4) if best else None,
            "ttft_ms": round(1000 * statistics.median(item.ttft_s), 2),
            "ordering_ms": round(1000 * statistics.median(item.ordering_s), 4),
            "gold_share": round(sum(item.is_gold) / len(item.is_gold), 4),
        }
    report["oracles"] = {name: round(value / num_documents, 4) for name, value in oracles.items()}
    if {"off", "tree"} <= set(answers):
        off, tree = report["orders"]["off"], report["orders"]["tree"]
        cached = off["cached_document_tokens"]
        report["tree_cached_ratio"] = round(tree["cached_document_tokens"] / cached, 3) if cached else None
        report["tree_ttft_ratio"] = round(tree["ttft_ms"] / off["ttft_ms"], 3)
    return report


def print_table(report: dict[str, Any]) -> None:
    """One row an order, and the two oracles."""
    print("\norder       cached document tokens  median TTFT  ordering  answers with the gold string")
    for name, row in report["orders"].items():
        print(
            f"{name:10}  {row['cached_document_tokens']:14} = {row['cached_share']:4.0%}  {row['ttft_ms']:8.1f} ms"
            f"  {row['ordering_ms']:5.2f} ms  {row['gold_share']:6.0%}"
        )
    for name, share in report["oracles"].items():
        print(f"{name:10}  {'':16} {share:4.0%}  (an oracle: whole documents, of an endless cache)")
    if "tree_ttft_ratio" in report:
        print(
            f"tree against off: {report['tree_cached_ratio']} times the cached document tokens, "
            f"{report['tree_ttft_ratio']} times the median TTFT"
        )


def plot(path: Path, report: dict[str, Any], answers: dict[str, Answers]) -> None:
    """Cached shares beside the oracles', and how many questions had their first token by when."""
    figure = Figure(figsize=(10.0, 4.4), dpi=120, layout="constrained")
    shares, times = figure.subplots(1, 2)
    names = list(answers)
    bars = shares.bar(names, [100 * report["orders"][name]["cached_share"] for name in names], color="tab:blue")
    shares.bar_label(bars, fmt="%.0f %%")
    for (name, share), style in zip(report["oracles"].items(), ("--", ":"), strict=True):
        shares.axhline(100 * share, color="tab:gray", linestyle=style, label=f"oracle: {name}")
    shares.set(ylabel="document tokens found in the cache (%)", title="Reuse")
    shares.legend(loc="lower right")
    for name in names:
        values = sorted(1000 * value for value in answers[name].ttft_s)
        ranks = [100 * (rank + 1) / len(values) for rank in range(len(values))]
        median = report["orders"][name]["ttft_ms"]
        times.step(values, ranks, where="post", label=f"{name}: median {median:.0f} ms")
    times.set(xlabel="time to first token (ms)", ylabel="questions (%)", xlim=(0, None), title="Time to first token")
    times.legend(loc="lower right")
    figure.savefig(path)


def read_plan(arguments: Sequence[str] | None = None) -> tuple[Plan, argparse.Namespace]:
    """The plan that the command line asks for."""
    default = Plan()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, value, text in (
        ("--questions", default.num_questions, "of every order"),
        ("--documents", default.num_documents, "in the corpus, up to 60"),
        ("--doc-tokens", default.doc_tokens, "of each document, up to 256"),
        ("--found", default.num_found, "documents for each question"),
        ("--max-tokens", default.max_tokens, "of an answer"),
        ("--seed", default.seed, "of the questions"),
    ):
        parser.add_argument(name, type=int, default=value, help=f"{text} (default: %(default)s)")
    parser.add_argument("--orders", default=",".join(ORDERS), help="also shuffle-1, ... (default: %(default)s)")
    parser.add_argument("--model", help="name or path (default: $PAGEDLLM_MODEL, else the embedded model)")
    parser.add_argument("--dtype", default="auto", help="of weights and KV (default: %(default)s)")
    parser.add_argument("--kv-gib", type=float, default=1.0, help="size of the KV pool (default: %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures")
    parser.add_argument("--log", type=Path, metavar="FILE", help="a line of JSON for each question")
    options = parser.parse_args(arguments)
    plan = Plan(
        num_questions=options.questions,
        num_documents=options.documents,
        doc_tokens=options.doc_tokens,
        num_found=options.found,
        orders=tuple(options.orders.split(",")),
        max_tokens=options.max_tokens,
        seed=options.seed,
    )
    return plan, options


def main() -> None:
    """Ask, report, draw."""
    plan, options = read_plan()
    named = {"model": options.model} if options.model else {}
    start = time.perf_counter()
    pool = int(options.kv_gib * 2**30)
    model = ChatPagedLLM(temperature=0, **named, engine_args={"dtype": options.dtype, "kv_cache_memory_bytes": pool})
    model.invoke("Hello!", max_tokens=4)  # the first call loads the model
    print(f"loaded in {time.perf_counter() - start:.1f} s")
    answers = run(model, plan, log=options.log)
    report = summarize(plan, answers)
    print_table(report)
    if options.plot is not None:
        plot(options.plot, report, answers)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
