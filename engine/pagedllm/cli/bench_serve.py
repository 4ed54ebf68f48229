"""``pagedllm bench serve``: throughput and latency of a server, ours or any that speaks OpenAI's API."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError, EngineError, MissingDependencyError
from .errors import clear_errors

if TYPE_CHECKING:
    from ..bench.datasets import Prompt, Shape
    from ..bench.serving import ServingPlan, ServingRun

__all__ = ["FIGURES", "serve"]

_DEFAULT_VOCAB_SIZE = 32000
_VOCAB_HELP = f"Token ids to draw from. Default: what the server says, else {_DEFAULT_VOCAB_SIZE}."

FIGURES = """\
What is measured: each request is streamed and timed by its client, from the moment it is sent. Prompts are token ids
unless they come from a file; output is greedy and of fixed length. One request before them warms the server up. Rates
are by the time from the first arrival to the last answer; failed requests count in no figure but their number.

TTFT: from sending a request to the first piece of its answer.

ITL: between two pieces of an answer. A server may send several tokens in one.

TPOT: from the first piece to the last, by the tokens after the first.

E2E: from sending a request to its last piece.

Goodput: requests per second that met all goals, such as --goodput "ttft:500 tpot:50": ttft, tpot, itl and e2el in
milliseconds.
"""


def _positive(help_text: str) -> Any:
    return typer.Option(min=1, help=help_text)


@clear_errors
def serve(
    base_url: Annotated[
        str | None, typer.Option(envvar="PAGEDLLM_BASE_URL", help="Where OpenAI's API begins: http://HOST:PORT/v1.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Default: the first that the server names.")] = None,
    dataset: Annotated[str, typer.Option(help="random, prefix_repetition, rag, or a file *.jsonl.")] = "random",
    num_prompts: Annotated[int, _positive("Requests in all.")] = 200,
    request_rate: Annotated[
        float, typer.Option(help="Arrivals per second, at random times (Poisson); inf: all at once.")
    ] = math.inf,
    max_concurrency: Annotated[int | None, _positive("Most requests under way.")] = None,
    input_len: Annotated[int, _positive("random: tokens of each prompt.")] = 128,
    output_len: Annotated[int, _positive("Tokens generated for each prompt.")] = 64,
    num_prefixes: Annotated[int, _positive("prefix_repetition: how many beginnings.")] = 10,
    prefix_len: Annotated[int, _positive("prefix_repetition: tokens of each.")] = 256,
    suffix_len: Annotated[int, _positive("prefix_repetition: tokens after it.")] = 64,
    num_documents: Annotated[int, _positive("rag: documents in all.")] = 40,
    documents_per_prompt: Annotated[int, _positive("rag: documents in a prompt.")] = 4,
    document_len: Annotated[int, _positive("rag: tokens of each.")] = 128,
    vocab_size: Annotated[int | None, typer.Option(min=100, help=_VOCAB_HELP)] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Generate all tokens; needs a server that knows the field.")] = True,
    goodput: Annotated[list[str] | None, typer.Option(help="Goals in ms, such as ttft:500; may be repeated.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for one answer.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and arrivals.")] = 0,
    json_file: Annotated[
        typer.FileTextWrite | None, typer.Option("--json", lazy=False, help="Write the figures to this file.")
    ] = None,
    plot: Annotated[str | None, typer.Option(help="Draw the times into this file (.png, .svg, .pdf).")] = None,
) -> None:
    """How fast a server answers requests that arrive one by one. Its key comes from PAGEDLLM_API_KEY."""
    try:
        # Lazy door: numpy and httpx, which --help need not wait for.
        from ..bench import datasets, serving_report  # noqa: PLC0415
    except ModuleNotFoundError as error:
        message = f"bench serve needs the package {error.name!r}: pip install 'langchain-pagedllm[bench]'"
        raise MissingDependencyError(message) from error

    goals = serving_report.parse_goals(goodput or [])
    lengths = {"input_len": input_len, "output_len": output_len, "prefix_len": prefix_len, "suffix_len": suffix_len}
    counts = {"num_prefixes": num_prefixes, "num_documents": num_documents}
    documents = {"documents_per_prompt": documents_per_prompt, "document_len": document_len}
    shape = datasets.Shape(**lengths, **counts, **documents)
    pace = {"request_rate": request_rate, "max_concurrency": max_concurrency, "seed": seed, "timeout_s": timeout}
    plan, num_ids = _plan(base_url, model, vocab_size, ignore_eos=ignore_eos, **pace)
    prompts = datasets.make_prompts(dataset, num_prompts, shape, vocab_size=num_ids, seed=seed)
    # The warm-up must leave nothing in the prefix cache that counts; a file's server may know chats alone.
    is_drawn = dataset in datasets.DATASETS
    warm_up = datasets.make_prompts("random", 1, shape, vocab_size=num_ids, seed=seed + 1) if is_drawn else prompts[:1]
    run = _run(plan, warm_up, prompts)
    figures = {**_description(plan, dataset, shape, num_ids), **serving_report.serving_figures(run, goals)}
    typer.echo(serving_report.serving_table(figures))
    if json_file is not None:
        json_file.write(json.dumps(figures, indent=2) + "\n")
    if plot is not None:
        serving_report.plot_run(run, plot)
    if figures["num_failed"]:
        raise typer.Exit(1)


def _plan(base_url: str | None, model: str | None, vocab_size: int | None, **options: Any) -> tuple[ServingPlan, int]:
    """What to send where, with what is not given asked of the server; and the ids that prompts are drawn from."""
    from ..bench import serving  # noqa: PLC0415

    if not base_url:
        raise ConfigError("base_url: give --base-url or set PAGEDLLM_BASE_URL")
    base_url, api_key = base_url.rstrip("/"), os.environ.get("PAGEDLLM_API_KEY") or None
    if model is None or vocab_size is None:
        server = asyncio.run(serving.describe_server(base_url, api_key, model))
        model = model or server.model
        vocab_size = vocab_size or server.vocab_size or _DEFAULT_VOCAB_SIZE
    return serving.ServingPlan(base_url=base_url, model=model, api_key=api_key, **options), vocab_size


def _run(plan: ServingPlan, warm_up: Sequence[Prompt], prompts: Sequence[Prompt]) -> ServingRun:
    from ..bench import serving  # noqa: PLC0415

    (first,) = asyncio.run(serving.run_plan(plan, warm_up, lambda: None)).answers
    if first.error:
        raise EngineError(f"the server does not answer the first request: {first.error}")
    with typer.progressbar(length=len(prompts), label="requests", file=sys.stderr) as bar:
        return asyncio.run(serving.run_plan(plan, prompts, lambda: bar.update(1)))


def _description(plan: ServingPlan, dataset: str, shape: Shape, vocab_size: int) -> dict[str, Any]:
    """What the figures depend on, with no secret and no number that JSON has not."""
    from ..bench.machine import versions  # noqa: PLC0415

    described = dataclasses.asdict(plan)
    del described["api_key"]
    if math.isinf(plan.request_rate):
        described["request_rate"] = "inf"
    shapes = dataclasses.asdict(shape)
    return {
        "scenario": "serve",
        "dataset": dataset,
        **described,
        **shapes,
        "vocab_size": vocab_size,
        "versions": versions(),
    }
