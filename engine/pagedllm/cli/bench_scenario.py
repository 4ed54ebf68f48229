"""``pagedllm bench scenario`` and ``bench scheduler``: experiments with memory and scheduling."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import EngineConfig
from .engines import open_engine
from .errors import clear_errors
from .options import with_engine_options

if TYPE_CHECKING:
    from ..api import Engine, ModelInfo
    from ..local import LocalEngine

__all__ = ["FIGURES", "SCHEDULER_FIGURES", "ScenarioName", "scenario", "scheduler"]


class ScenarioName(str, enum.Enum):
    """What there is to run; the scenarios themselves are loaded when one is."""

    FRAGMENTATION = "fragmentation"
    PARALLEL_SAMPLING = "parallel-sampling"
    BATCHING = "batching"
    PREFIX = "prefix"
    PRESSURE = "pressure"
    TRADEOFF = "tradeoff"
    CHATBOT_SLO = "chatbot-slo"
    SERVED = "served"
    GRAMMAR = "grammar"


# Paragraph by paragraph, because the help's text is refilled.
FIGURES = """\
All scenarios send random prompts to an engine in this process, greedily and with outputs of fixed length, and compare
ways to do the same one after the other. The file of --json has the plan (what was sent), the figures (result), what a
plot shows besides (series), and what they depend on: engine options, versions, machine.

fragmentation: a long random mixed load. Share of the allocated KV slots that hold nothing, with blocks on demand
(unused_share_paged) and with max_model_len reserved for each sequence (unused_share_reserved), while the engine is
full; mean_tokens resident of a sequence; drift, the last tenth of the time minus the first.

parallel-sampling: one prompt, n = 1, 2, 4, 8 answers. Blocks at the peak with the prompt shared (blocks_shared) and
not (blocks_unshared), and blocks_minimum: one answer with its prompt, and the own tokens of its children, the other
n - 1. The result is of the largest n.

batching: 128 requests at once, a quarter long, 8 seats. Continuous batching over static batches whose rows are padded
until the longest ends, and over those whose finished rows are dropped: ratios of throughput (above 1: continuous is
faster), steps (how many times as many the padded batches take) and mean latency (below 1: continuous is sooner). It
takes minutes; --scale 0.5 sends half as many.

prefix: a shared prefix of 1,000 tokens, time to first token with the cache off (cold) and on (warm); and what a flood
of other prompts leaves of a pinned prefix, of one that is not pinned, and of one whose time is over.

pressure: a pool far too small, with preemption by swap, recompute and auto, in float32. Whether the texts are those of
a roomy pool; a text is excused from a token on at which the two best log probabilities are less than 1e-4 apart.

tradeoff: max_num_seqs swept; tokens per second against the time between tokens (itl) and of whole answers (e2e), beside
max_num_seqs by the mean duration of a step (predicted).

chatbot-slo: 50 tokens in, 150 out. P95 of the time between tokens in ms, before and after max_num_seqs is lowered,
prefix caching is on and max_model_len is lowered, one after the other.

served: what a server in the same process costs the engine. Median duration of the steps in which 16 users each get a
token, with the users in this process and with the users in another one, who ask over HTTP; and tokens per second.

grammar: what it costs to hold answers to a grammar. Median duration of the steps in which a batch of 8 gets a token
each, with free answers, and with answers that must be JSON of a schema, or match an expression; cost is the share by
which these take longer.
"""

_SCALE_HELP = "Multiplies the number of requests; the figures of few are rough. parallel-sampling has none to scale."
SCHEDULER_FIGURES = """\
A step is schedule, update and retire, with all seats taken and requests of 100 to 500 tokens waiting: what the engine
does besides computing. median and mean are in µs, by policy and cached blocks; ratio is that of the medians, most
cached blocks over least.
"""


@with_engine_options
def scenario(
    config: EngineConfig,
    name: Annotated[ScenarioName, typer.Argument(help="Which one.")],
    scale: Annotated[float, typer.Option(min=0.01, max=100.0, help=_SCALE_HELP)] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the random prompts.")] = 0,
    json_file: Annotated[
        typer.FileTextWrite | None, typer.Option("--json", lazy=False, help="Write plan and figures to this file.")
    ] = None,
    plot: Annotated[
        typer.FileBinaryWrite | None, typer.Option(lazy=False, help="Draw them into this file, as PNG.")
    ] = None,
) -> None:
    """Compare ways to use memory and batches, side by side on the engine in this process."""
    # Lazy doors: numpy and the engine's core, which --help need not wait for.
    from ..bench.plot import new_figure  # noqa: PLC0415
    from ..bench.scenarios import SCENARIOS, Setting  # noqa: PLC0415

    chosen = SCENARIOS[name.value]
    chosen.check(config)
    if scale != 1.0 and not chosen.scaled:
        raise typer.BadParameter(f"{name.value} has no number of requests to scale", param_hint="--scale")
    figure = new_figure() if plot is not None else None  # before the work: matplotlib may be missing
    infos: list[ModelInfo] = []

    def open_and_note(config: EngineConfig, *, on_step: Any) -> LocalEngine:
        engine = open_engine(config, on_step=on_step)
        infos.append(engine.model_info())
        return engine

    plan = chosen.scaled_plan(scale)
    outcome = chosen.run(Setting(config=config, open_engine=open_and_note, serve=_serve, seed=seed), plan)
    _print(outcome.result)
    if json_file is not None:
        found = {"scenario": name.value, "model": config.model, "seed": seed, "plan": dataclasses.asdict(plan)}
        facts = {"result": outcome.result, "series": outcome.series, **_surroundings(config, infos[0])}
        _write(json_file, found | facts)
    if figure is not None and plot is not None:
        chosen.draw(figure, outcome)
        figure.savefig(plot, format="png")


@clear_errors
def scheduler(
    num_running: Annotated[int, typer.Option(min=1, max=4096, help="Seats, all taken.")] = 64,
    num_waiting: Annotated[int, typer.Option(min=0, help="Requests that wait.")] = 1000,
    cached_blocks: Annotated[
        list[int], typer.Option(min=1, help="Blocks in the prefix cache; once for each measurement.")
    ] = [1000, 100_000],  # noqa: B006  typer reads it, and nobody changes it
    num_steps: Annotated[int, typer.Option(min=1, help="Steps that count.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, lengths and priorities.")] = 0,
    json_file: Annotated[
        typer.FileTextWrite | None, typer.Option("--json", lazy=False, help="Write plan and figures to this file.")
    ] = None,
) -> None:
    """What scheduler and KV cache manager take of each step, under every policy. Loads no model."""
    from ..bench.machine import describe_machine, versions  # noqa: PLC0415
    from ..bench.scheduler_cost import SchedulerPlan, measure_policies  # noqa: PLC0415

    plan = SchedulerPlan(
        num_running=num_running,
        num_waiting=num_waiting,
        nums_cached_blocks=tuple(cached_blocks),
        num_steps=num_steps,
        seed=seed,
    )
    result = measure_policies(plan)
    _print(result)
    if json_file is not None:
        facts = {"versions": versions(), "machine": describe_machine()}
        _write(json_file, {"scenario": "scheduler", "plan": dataclasses.asdict(plan), "result": result, **facts})


@contextlib.contextmanager
def _serve(engine: Engine) -> Iterator[str]:
    from ..server.config import ServerConfig  # noqa: PLC0415  lazy door: FastAPI, which one scenario needs
    from ..server.run import serving  # noqa: PLC0415

    with serving(engine, ServerConfig(port=0)) as (url, _):
        yield f"{url}/v1"


def _print(result: dict[str, Any]) -> None:
    """A line for each figure; a list of objects as a table."""
    width = max(map(len, result))
    for name, value in result.items():
        if not isinstance(value, list):
            typer.echo(f"{name:<{width}}  {_show(value)}")
            continue
        typer.echo(f"{name}:")
        rows = [list(value[0]), *([_show(cell) for cell in row.values()] for row in value)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            typer.echo("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) and abs(value) < 1000 else f"{value}"


def _surroundings(config: EngineConfig, info: ModelInfo) -> dict[str, Any]:
    """What the figures depend on."""
    import torch  # noqa: PLC0415  lazy door: the engine has loaded it by now

    from ..bench.machine import describe_machine, versions  # noqa: PLC0415

    return {
        "kernels": info.kernels,
        "dtype": info.dtype,
        "num_threads": torch.get_num_threads(),
        "engine_args": dataclasses.asdict(config),
        "versions": versions(),
        "machine": describe_machine(),
    }


def _write(file: typer.FileTextWrite, found: dict[str, Any]) -> None:
    json.dump(found, file, indent=2)
    file.write("\n")
