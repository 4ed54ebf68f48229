"""``pagedllm bench router``: routing policies over real engines on Ray Serve."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from ..config import EngineConfig
from ..errors import MissingDependencyError
from .engines import open_engine
from .options import with_engine_options

__all__ = ["ABOUT", "router"]

ABOUT = """\
What is measured: prompts of a few prefixes and a question each, at random times, through the ingress; first each prefix
once. The KV pool of each engine holds --pool-share of all prefixes together.

load: the arrival rate as a share of what the cluster did under power_of_two when all arrived at once.

cached_tokens: prompt tokens that were found in a cache, of all measured requests.

imbalance: tokens in blocks of running sequences, averaged over time: the largest of the engines' by the mean.
"""


@with_engine_options
def router(
    config: EngineConfig,
    replicas: Annotated[int, typer.Option(min=2, help="Engines, each with one CPU.")] = 2,
    prefixes: Annotated[int, typer.Option(min=1, help="How many, equally frequent.")] = 16,
    prefix_len: Annotated[int, typer.Option(min=16, help="Tokens of each.")] = 384,
    question_len: Annotated[int, typer.Option(min=1, help="Tokens after it.")] = 24,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 12,
    requests: Annotated[int, typer.Option(min=1, help="Measured for each policy.")] = 120,
    pool_share: Annotated[float, typer.Option(min=0.01, help="Of all prefixes, in each KV pool.")] = 0.6,
    load: Annotated[float, typer.Option(min=0.01, help="Arrival rate, see below.")] = 0.7,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, order and arrivals.")] = 0,
    json_file: Annotated[typer.FileTextWrite | None, typer.Option("--json", lazy=False, help="All figures.")] = None,
) -> None:
    """Send the same prefix traffic through the prefix-aware router and through Ray Serve's own."""
    # Lazy door: Ray and numpy, which --help need not wait for.
    try:
        from ..bench.router.live import LivePlan, compare_routers  # noqa: PLC0415
    except ModuleNotFoundError as error:
        message = f"this needs the package {error.name!r}: pip install 'langchain-pagedllm[ray,bench]'"
        raise MissingDependencyError(message) from error
    plan = LivePlan(
        num_replicas=replicas,
        num_prefixes=prefixes,
        prefix_len=prefix_len,
        question_len=question_len,
        output_len=output_len,
        num_requests=requests,
        pool_share=pool_share,
        load=load,
        seed=seed,
    )
    with open_engine(config) as engine:
        bytes_per_token = engine.model_info().kv_bytes_per_token
    result = compare_routers(config, plan, ("prefix", "power_of_two"), bytes_per_token)
    typer.echo(f"{result['rate']:.2f} requests a second")
    for row in result["policies"]:
        typer.echo(", ".join(f"{name} {value}" for name, value in row.items()))
    if json_file is not None:
        json.dump({"model": config.model, "plan": dataclasses.asdict(plan), **result}, json_file, indent=2)
        json_file.write("\n")
