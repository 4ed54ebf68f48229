"""``pagedllm bench``: throughput and latency of the engine in this process, and of servers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ..config import EngineConfig
from . import bench_router, bench_scenario, simulate_router
from .bench_serve import FIGURES, serve
from .engines import open_engine, set_num_threads
from .options import with_engine_options

__all__ = ["app"]

app = typer.Typer(
    help="Measure the engine in this process, or a server (serve).",
    no_args_is_help=True,
    rich_markup_mode=None,
)

# Paragraph by paragraph, because the help's text is refilled.
_FIGURES = """\
What is measured: all prompts of a batch are sent at once. They are random, of equal length and without a shared prefix;
the prefix cache is emptied before each batch. Output is greedy and of fixed length: the model's end tokens are ignored.
Loading and warm-up do not count.

prefill_tokens_per_second: prompt tokens by the time of batches that generate one token for each prompt.

decode_tokens_per_second: tokens by time of the steps in which every sequence computes a single token, so that no
prompt is being computed. The time of a step runs from the end of the one before.

output_tokens_per_second: generated tokens by the time of whole batches, from the first prompt sent to the last token.

ttft_ms: time to first token, from sending a prompt to its first token; it includes waiting for others of the batch.

itl_ms: inter-token latency, from each token of an answer to the next, as a consumer sees them.

latency_ms: time of a whole batch.

p50, p95, p99 and mean are over all requests (ttft_ms), all pairs of tokens (itl_ms) or all batches (latency_ms).
"""

app.command(epilog=bench_scenario.FIGURES)(bench_scenario.scenario)
app.command(epilog=bench_scenario.SCHEDULER_FIGURES)(bench_scenario.scheduler)
app.command(epilog=FIGURES)(serve)
app.command(epilog=simulate_router.ABOUT)(simulate_router.simulate_router)
app.command(epilog=bench_router.ABOUT)(bench_router.router)

_BOUNDS = """\
What is measured: bounds and engine in turns, in one process and one thread, several rounds after one that warms up.
Figures are medians over the rounds; a share is the median of each round's own ratio, with the bound measured before
and after the engine and the better of the two taken, so that a machine whose speed wanders does not decide it.

read_gb_per_second: 256 MiB, read in order by all threads; the fastest of torch's sum, its norm, and a plain loop of
vector loads where the C++ kernels serve.

linear: the model's linear layers alone, head included, one after the other, by the kernels that serve the engine, for
so many rows. What an operation costs to call is in it.

decode, by batch size: tokens by time of the engine's steps that only decode, as in bench throughput. Its bound is, for
a batch of 1, the bytes of the linear layers' weights over the read bandwidth; for others the linear layers alone.

prefill, by length of a single prompt: its tokens by the time from sending it to its first token. The bound is the
linear layers alone for all of its tokens at once, with the head for the last of them.

outside_kernels_share: of the time of steps that only decode, 32 sequences at once, what no kernel takes. step_seconds
has all parts of such a step: each kernel (where layers run in one go, the activation counts as linear, and so does what
is added to the residual stream), between_kernels (Python), scheduler, forward_batch (making the inputs),
sampler, detokenizer (text and chunks), between_steps (handing out chunks, taking messages).

context: a forward pass that decodes one token for each of 8 sequences of such a length, over KV in random blocks. The
attention of all layers in it (and alone, without the rest), the KV bytes it reads by that time, their share of the read
bandwidth; r_squared is how much of the step's time a straight line over the length explains.
"""

_STREAM_INPUT_LEN = 32
_SEED_HELP = "Of the random prompts."
_JSON_HELP = "Write the figures to this file, as an object; as a list of them if there are several batch sizes."
_TRACE_HELP = "Write a line of JSON for each step: admitted, retired, preempted, tokens, KV use, and more."


@app.command(epilog=_FIGURES)
@with_engine_options
def throughput(
    config: EngineConfig,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens generated for each prompt.")] = 64,
    num_prompts: Annotated[
        str, typer.Option(help="Prompts, all sent at once. Several numbers (1,8,32) are measured one after the other.")
    ] = "32",
    seed: Annotated[int, typer.Option(min=0, help=_SEED_HELP)] = 0,
    json_file: Annotated[typer.FileTextWrite | None, typer.Option("--json", lazy=False, help=_JSON_HELP)] = None,
    trace: Annotated[typer.FileTextWrite | None, typer.Option(lazy=False, help=_TRACE_HELP)] = None,
) -> None:
    """How many tokens per second a batch of prompts gives.

    Each size is warmed up with a batch of its own. With several sizes, a line of JSON is printed for each:
    {"n": 8, "total_s": 3.1, "prefill_s": 1.4}, where prefill_s is from a batch that generates one token a prompt.
    """
    sizes = _parse_sizes(num_prompts)
    plans = [{"num_prompts": size, "input_len": input_len, "output_len": output_len} for size in sizes]
    results = _measure_all("throughput", config, plans, num_iters=1, num_iters_warmup=1, seed=seed, trace=trace)
    if len(sizes) > 1:
        for result in results:
            line = {"n": result["num_prompts"], "total_s": result["duration_s"], "prefill_s": result["prefill_s"]}
            typer.echo(json.dumps(line))
    _write_json(json_file, results)


@app.command(epilog=_FIGURES)
@with_engine_options
def latency(
    config: EngineConfig,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 32,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens generated for each prompt.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts in a batch, all sent at once.")] = 8,
    num_iters: Annotated[int, typer.Option(min=1, help="Batches that count.")] = 10,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Batches before them; up to 8 tokens of output.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help=_SEED_HELP)] = 0,
    json_file: Annotated[typer.FileTextWrite | None, typer.Option("--json", lazy=False, help=_JSON_HELP)] = None,
    trace: Annotated[typer.FileTextWrite | None, typer.Option(lazy=False, help=_TRACE_HELP)] = None,
) -> None:
    """How long a batch of prompts takes, over several batches."""
    plans = [{"num_prompts": batch_size, "input_len": input_len, "output_len": output_len}]
    counts = {"num_iters": num_iters, "num_iters_warmup": num_iters_warmup}
    (result,) = _measure_all("latency", config, plans, **counts, seed=seed, trace=trace)
    spread = result["latency_ms"]
    typer.echo("batch latency in ms: " + ", ".join(f"{name} {value:.1f}" for name, value in spread.items()))
    _write_json(json_file, [result])


@app.command(epilog=_BOUNDS)
@with_engine_options
def roofline(
    config: EngineConfig,
    batch_sizes: Annotated[str, typer.Option(help="Sequences decoded at once, several numbers.")] = "1,8,32,64",
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt before decoding.")] = 128,
    output_len: Annotated[int, typer.Option(min=3, help="Tokens decoded for each prompt.")] = 64,
    prefill_lens: Annotated[str, typer.Option(help="Lengths of single prompts.")] = "512,2048",
    contexts: Annotated[str, typer.Option(help="Context lengths, 8 sequences of each.")] = "512,1024,2048,4096",
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help=_SEED_HELP)] = 0,
    json_file: Annotated[typer.FileTextWrite | None, typer.Option("--json", lazy=False, help=_JSON_HELP)] = None,
) -> None:
    """How near the engine comes to what bounds it, and where the rest of a step goes."""
    # Lazy door: torch and all parts of an engine, which --help need not wait for.
    from ..bench.machine import describe_machine, versions  # noqa: PLC0415
    from ..bench.roofline import RooflinePlan, measure_roofline, table  # noqa: PLC0415

    plan = RooflinePlan(
        batch_sizes=tuple(_parse_sizes(batch_sizes, "--batch-sizes")),
        input_len=input_len,
        output_len=output_len,
        prefill_lens=tuple(_parse_sizes(prefill_lens, "--prefill-lens")),
        contexts=tuple(_parse_sizes(contexts, "--contexts")),
        num_rounds=rounds,
        seed=seed,
    )
    set_num_threads()
    result = measure_roofline(config, plan)
    typer.echo(table(result))
    surroundings = {"num_threads": _num_threads(), "versions": versions(), "machine": describe_machine()}
    named = {"scenario": "roofline", "model": config.model, "seed": seed, "engine_args": dataclasses.asdict(config)}
    _write_json(json_file, [{**named, **result, **surroundings}])


_STALL = """\
What is measured: a stream runs alone; when it has given some tokens, a long prompt arrives. Medians over the rounds.

gap_before_ms: median time between two tokens of the stream before that.

largest_gap_after_ms: the longest time between two of its tokens after that. stretch: by gap_before_ms of its round.

prompt_ttft_ms: from sending the long prompt to its first token.
"""


@app.command(epilog=_STALL)
@with_engine_options
def stall(
    config: EngineConfig,
    stream_len: Annotated[int, typer.Option(min=4, help="Tokens of the stream.")] = 64,
    arrives_after: Annotated[int, typer.Option(min=2, help="Tokens of the stream before the prompt arrives.")] = 24,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens of the prompt that arrives.")] = 4000,
    rounds: Annotated[int, typer.Option(min=1, help="How often.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help=_SEED_HELP)] = 0,
    json_file: Annotated[typer.FileTextWrite | None, typer.Option("--json", lazy=False, help=_JSON_HELP)] = None,
) -> None:
    """How much a long prompt that arrives slows down a stream that is running."""
    # Lazy door: numpy, which --help need not wait for.
    from ..bench.machine import describe_machine, versions  # noqa: PLC0415
    from ..bench.stall import StallPlan, measure_stall  # noqa: PLC0415

    plan = StallPlan(
        stream_input_len=_STREAM_INPUT_LEN,
        stream_len=stream_len,
        arrives_after=arrives_after,
        prompt_len=prompt_len,
        num_rounds=rounds,
        seed=seed,
    )
    with open_engine(config) as engine:
        result = measure_stall(engine, plan)
    typer.echo(", ".join(f"{name} {value:.1f}" for name, value in result.items()))
    surroundings = {"num_threads": _num_threads(), "versions": versions(), "machine": describe_machine()}
    named = {"scenario": "stall", "model": config.model, "engine_args": dataclasses.asdict(config)}
    _write_json(json_file, [{**named, **dataclasses.asdict(plan), **result, **surroundings}])


def _measure_all(
    scenario: str,
    config: EngineConfig,
    plans: Sequence[dict[str, int]],
    *,
    num_iters: int,
    num_iters_warmup: int,
    seed: int,
    trace: typer.FileTextWrite | None,
) -> list[dict[str, Any]]:
    """Measure workload after workload on one engine; prints a table and writes the trace."""
    # Lazy door: numpy and the engine's core, which --help need not wait for.
    from ..bench import report, timing, workloads  # noqa: PLC0415
    from ..bench.machine import describe_machine, versions  # noqa: PLC0415

    recorder = timing.StepRecorder()
    results = []
    with open_engine(config, on_step=recorder.record) as engine:
        surroundings = {
            "kernels": engine.model_info().kernels,
            "dtype": engine.model_info().dtype,
            "num_threads": _num_threads(),
            "engine_args": dataclasses.asdict(config),
            "versions": versions(),
            "machine": describe_machine(),
        }
        for plan in plans:
            workload = workloads.Workload(**plan)
            counts = {"num_iters": num_iters, "num_iters_warmup": num_iters_warmup}
            measurement = timing.measure(engine, recorder, workload, **counts, seed=seed)
            if trace is not None:
                trace.writelines(json.dumps(line) + "\n" for line in report.trace_lines(measurement))
            named = {"scenario": scenario, "model": config.model, "seed": seed}
            results.append({**named, **report.figures(measurement), **surroundings})
    typer.echo(report.table(results))
    return results


def _parse_sizes(text: str, option: str = "--num-prompts") -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r}: a positive number, or several with commas", param_hint=option)
    return [int(part) for part in parts]


def _num_threads() -> int:
    import torch  # noqa: PLC0415  lazy door: the engine has loaded it by now

    return torch.get_num_threads()


def _write_json(file: typer.FileTextWrite | None, results: list[dict[str, Any]]) -> None:
    if file is not None:
        json.dump(results if len(results) > 1 else results[0], file, indent=2)
        file.write("\n")
