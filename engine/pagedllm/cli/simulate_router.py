"""``pagedllm bench simulate-router``: routing policies over replicas that need no machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import EngineConfig
from ..errors import ConfigError
from .engines import open_engine
from .options import with_engine_options

__all__ = ["ABOUT", "simulate_router"]

ABOUT = """\
Simulated engines are the real scheduler and KV cache on a clock that jumps; their steps take what --costs says, or what
steps of the model took here. The router is the real one.

load: the arrival rate as a share of what the engines could do if nothing were ever cached, eight sequences decoding.

A trace is 'conversations', made up by the seed, or a JSON Lines file as Mooncake publishes them.
"""


@with_engine_options
def simulate_router(
    config: EngineConfig,
    replicas: Annotated[int, typer.Option(min=1, help="Engines.")] = 64,
    trace: Annotated[str, typer.Option(help="'conversations', or a file of requests.")] = "conversations",
    requests: Annotated[int, typer.Option(min=1, help="How many of the trace.")] = 4000,
    load: Annotated[float, typer.Option(min=0.01, help="Arrival rate, see below.")] = 0.7,
    kv_tokens: Annotated[int, typer.Option(min=1, help="Tokens in each KV pool.")] = 32768,
    policies: Annotated[str, typer.Option(help="Which, with commas; all by default.")] = "",
    costs: Annotated[Path | None, typer.Option(help="JSON of measured step times, instead of measuring.")] = None,
    save_costs: Annotated[Path | None, typer.Option(help="Write the step times measured here as JSON.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of trace, arrivals and choices.")] = 0,
    json_file: Annotated[typer.FileTextWrite | None, typer.Option("--json", lazy=False, help="All figures.")] = None,
) -> None:
    """Compare routing policies over many simulated replicas: what is found in caches, and how long requests wait."""
    # Lazy door: numpy and control, which --help need not wait for.
    from ..bench.router.policies import POLICIES  # noqa: PLC0415
    from ..bench.router.report import figures, table  # noqa: PLC0415
    from ..bench.router.simulation import ReplicaPlan, simulate  # noqa: PLC0415
    from ..bench.router.traces import scaled  # noqa: PLC0415

    chosen = [name.strip() for name in policies.split(",")] if policies else list(POLICIES)
    if wrong := [name for name in chosen if name not in POLICIES]:
        raise ConfigError.for_value("policies", wrong[0], f"must be some of {', '.join(POLICIES)}")
    step_costs = _find_costs(config, costs, save_costs)
    arriving = _find_trace(trace, requests, replicas, seed)
    work_s = sum(step_costs.work(item.num_prompt_tokens, item.output_len) for item in arriving) / len(arriving)
    rate = load * replicas / work_s
    arriving = scaled(arriving, rate=rate, seed=seed)
    longest = max(item.num_prompt_tokens + item.output_len for item in arriving)
    if longest > kv_tokens - config.block_size:
        raise ConfigError.for_value("kv_tokens", kv_tokens, f"the trace has a request of {longest} tokens")
    limits = config.step_limits("cpu")  # whose steps were measured
    plan = ReplicaPlan(
        costs=step_costs,
        num_blocks=kv_tokens // config.block_size,
        block_size=config.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
    )
    typer.echo(f"{len(arriving)} requests, {rate:.1f} a second, at {replicas} replicas; steps: {step_costs}")
    rows = []
    for name in chosen:
        rows.append(figures(simulate(arriving, plan, policy=name, num_replicas=replicas, seed=seed)))
        typer.echo(f"{name}: done", err=True)
    typer.echo(table(rows))
    if json_file is not None:
        described = {"replicas": replicas, "trace": trace, "load": load, "rate": rate, "seed": seed}
        made = {"plan": dataclasses.asdict(plan), "policies": rows}
        json.dump({**described, **made}, json_file, indent=2)
        json_file.write("\n")


def _find_costs(config: EngineConfig, source: Path | None, target: Path | None) -> Any:
    from ..bench.router.costs import measure_costs, read_costs  # noqa: PLC0415  lazy door, as above

    if source is not None:
        if target is not None:
            raise ConfigError("--costs are read and --save-costs are measured: give one of them")
        return read_costs(source)
    records: list[Any] = []
    with open_engine(config, on_step=records.append) as engine:
        info = engine.model_info()
        measured = measure_costs(engine, records, source=f"{info.model}, {info.dtype}, {info.kernels} kernels")
    if target is not None:
        target.write_text(json.dumps(dataclasses.asdict(measured), indent=2) + "\n", encoding="utf-8")
    return measured


def _find_trace(trace: str, num_requests: int, num_replicas: int, seed: int) -> Any:
    from ..bench.router.traces import conversations, read_trace  # noqa: PLC0415  lazy door, as above

    if trace == "conversations":
        return conversations(num_requests, seed=seed, num_sessions=6 * num_replicas)
    return read_trace(Path(trace), max_requests=num_requests)
