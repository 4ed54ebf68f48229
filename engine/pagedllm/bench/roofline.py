"""How near an engine comes to what bounds it: bounds and engine measured in turns, in one process and one thread."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

import numpy as np

from ..api import GenerateRequest
from ..config import EngineConfig
from ..control.sequence import Sequence
from ..core import EngineCore
from ..errors import ConfigError
from ..files.locate import locate_model
from ..streams import Chunks
from ..text.tokenizer import load_tokenizer
from ..worker import Worker
from .bounds import Contexts, ContextTimes, LinearLayers, ReadBandwidth
from .parts import StepTimes, TimedKernels, Timeline, build_timed_core
from .report import decode_rate, only_decodes
from .timing import StepRecorder
from .workloads import Workload, random_requests

__all__ = ["RooflinePlan", "measure_roofline", "table"]

_Result = TypeVar("_Result")

_REPEATS = 3
_LINEAR_ROWS = 512
_CONTEXT_BATCH = 8
# The batch size whose steps are taken apart.
_PARTS_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class RooflinePlan:
    """What is measured.

    Args:
        batch_sizes: Of the decode figures.
        input_len: Tokens of each prompt before decoding; contexts are this to ``input_len + output_len``.
        output_len: Tokens decoded for each prompt.
        prefill_lens: Lengths of single prompts.
        contexts: Context lengths of the steps that show what a longer context costs.
        num_rounds: How often everything is measured, in turns.
        seed: Of the prompts.
    """

    batch_sizes: tuple[int, ...]
    input_len: int
    output_len: int
    prefill_lens: tuple[int, ...]
    contexts: tuple[int, ...]
    num_rounds: int
    seed: int


@dataclass
class _Rounds:
    """Raw measurements, one entry for each round."""

    read: list[dict[str, float]] = field(default_factory=list)
    linear: dict[int, list[float]] = field(default_factory=dict)
    decode: dict[int, list[float]] = field(default_factory=dict)
    decode_bound: dict[int, list[float]] = field(default_factory=dict)
    prefill: dict[int, list[float]] = field(default_factory=dict)
    prefill_bound: dict[int, list[float]] = field(default_factory=dict)
    contexts: dict[int, list[ContextTimes]] = field(default_factory=dict)
    parts: list[dict[str, float]] = field(default_factory=list)


class _TimedEngine:
    """An engine of timed parts in a worker of its own, driven as LocalEngine drives one."""

    def __init__(self, config: EngineConfig) -> None:
        files = locate_model(config.model)
        tokenizer = load_tokenizer(
            files, chat_template=config.chat_template, template_variables=dict(config.chat_template_kwargs)
        )
        self.recorder, self.timeline = StepRecorder(), Timeline()
        build = functools.partial(build_timed_core, self.timeline, config, files, tokenizer, self.recorder.record)
        self._worker = Worker(build)

    def __enter__(self) -> _TimedEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._worker.stop()

    def call(self, function: Callable[[EngineCore], _Result]) -> _Result:
        return self._worker.call(function).result()

    def run(self, workload: Workload, rng: np.random.Generator) -> float:
        """Seconds from sending all prompts to their last token."""
        vocab_size = self.call(lambda core: core.model_runner.model_config.vocab_size)
        self.call(_forget_prefixes)
        self.recorder.take()
        self.timeline.take()
        sequences = [
            Sequence(
                request_id=f"prompt {i}",
                token_ids=_token_ids(request),
                num_prompt_tokens=workload.input_len,
                max_tokens=workload.output_len,
                sampling=request.sampling,
                seed=0,
                eos_token_ids=frozenset(),
            )
            for i, request in enumerate(random_requests(workload, rng, vocab_size=vocab_size, eos_token_ids=()))
        ]
        start = time.perf_counter()
        for stream in self._worker.submit([[sequence] for sequence in sequences]):
            for _ in Chunks(stream, _do_nothing):
                pass
        seconds = time.perf_counter() - start
        self.call(_do_nothing)  # answered between two steps, so the last one has been recorded
        return seconds


def measure_roofline(config: EngineConfig, plan: RooflinePlan) -> dict[str, Any]:
    """Measure and compare; the command's help defines the figures.

    Raises:
        PagedLLMError: The model cannot be loaded, or the plan does not fit it.
    """
    rounds, rng = _Rounds(), np.random.default_rng(plan.seed)
    with _TimedEngine(config) as engine:
        longest = max(plan.input_len + plan.output_len, *(n + 1 for n in plan.prefill_lens), *plan.contexts)
        engine.call(lambda core: _check_fits(core, longest))
        read = engine.call(lambda _: ReadBandwidth())
        linear = engine.call(lambda core: LinearLayers(core.model_runner))
        contexts = engine.call(
            lambda core: Contexts(core.model_runner, batch_size=_CONTEXT_BATCH, max_context=max(plan.contexts))
        )
        _measure_round(engine, plan, _Rounds(), rng, read, linear, contexts)  # warms up everything once
        for _ in range(plan.num_rounds):
            _measure_round(engine, plan, rounds, rng, read, linear, contexts)
        described = engine.call(_describe)
    return {**_figures(rounds), "num_rounds": plan.num_rounds, **described}


def table(result: dict[str, Any]) -> str:
    """The figures for reading."""
    lines = [f"read bandwidth {result['read_gb_per_second']:.1f} GB/s"]
    for kind in ("decode", "prefill"):
        for size, entry in result[kind].items():
            rates = f"{entry['tokens_per_second']:8.1f} of {entry['bound_tokens_per_second']:8.1f} tok/s"
            lines.append(f"{kind:8}{size:>6}  {rates}  {entry['share']:6.1%}")
    for length, entry in result["context"]["lengths"].items():
        times = f"step {1000 * entry['step_seconds']:8.2f} ms, attention {1000 * entry['attention_seconds']:8.2f} ms"
        lines.append(f"context {length:>6}  {times}, KV at {entry['share_of_read']:6.1%} of the read bandwidth")
    if result["context"]["r_squared"] is not None:
        lines.append(f"a step's time is linear in the context with R2 {result['context']['r_squared']:.4f}")
    total = sum(result["step_seconds"].values())
    for name, seconds in result["step_seconds"].items():
        lines.append(f"{name:24} {1000 * seconds:8.3f} ms  {seconds / total:6.1%}")
    if result["outside_kernels_share"] is not None:
        lines.append(f"outside kernels {result['outside_kernels_share']:.1%}")
    return "\n".join(lines)


def _measure_round(
    engine: _TimedEngine,
    plan: RooflinePlan,
    rounds: _Rounds,
    rng: np.random.Generator,
    read: ReadBandwidth,
    linear: LinearLayers,
    contexts: Contexts,
) -> None:
    def linear_s(num_rows: int, num_head_rows: int) -> float:
        return engine.call(lambda _: linear.measure(num_rows, num_head_rows=num_head_rows, repeats=_REPEATS))

    def read_s() -> float:
        speeds = engine.call(lambda _: read.measure(_REPEATS))
        rounds.read.append(speeds)
        return linear.num_weight_bytes / max(speeds.values())

    for size in plan.batch_sizes:
        # The bound before and after: a machine whose speed wanders is caught on both sides.
        before, read_before = linear_s(size, size), read_s()
        engine.run(Workload(num_prompts=size, input_len=plan.input_len, output_len=plan.output_len), rng)
        steps, times = engine.recorder.take(), engine.timeline.take()
        rate = decode_rate([steps])
        if rate is None:
            raise ConfigError.for_value("output_len", plan.output_len, "no step only decoded; raise it")
        after, read_after = linear_s(size, size), read_s()
        bound_s = min(read_before, read_after) if size == 1 else min(before, after)
        rounds.linear.setdefault(size, []).append(min(before, after))
        rounds.decode.setdefault(size, []).append(rate)
        rounds.decode_bound.setdefault(size, []).append(size / bound_s)
        if size == _PARTS_BATCH:
            decoding = [only_decodes(step) for step in steps]
            rounds.parts.append(_mean_parts(times, decoding))
    for length in plan.prefill_lens:
        before = linear_s(length, 1)
        seconds = engine.run(Workload(num_prompts=1, input_len=length, output_len=1), rng)
        rounds.prefill.setdefault(length, []).append(length / seconds)
        rounds.prefill_bound.setdefault(length, []).append(length / min(before, linear_s(length, 1)))
    rounds.linear.setdefault(_LINEAR_ROWS, []).append(linear_s(_LINEAR_ROWS, _LINEAR_ROWS))
    for context in plan.contexts:
        rounds.contexts.setdefault(context, []).append(
            engine.call(functools.partial(_measure_context, contexts=contexts, context=context))
        )


def _token_ids(request: GenerateRequest) -> list[int]:
    assert isinstance(request.prompt, tuple), "random prompts are token ids"
    return list(request.prompt)


def _measure_context(core: EngineCore, contexts: Contexts, context: int) -> ContextTimes:
    kernels = core.model_runner.kernels
    assert isinstance(kernels, TimedKernels)
    return contexts.measure(context, seconds_by_kernel=kernels.seconds, repeats=_REPEATS)


def _mean_parts(times: List[StepTimes], decoding: List[bool]) -> dict[str, float]:
    """Mean seconds of each part over the steps that only decode, with the time between steps as a part."""
    assert len(times) == len(decoding)
    sums: dict[str, float] = {}
    num_steps = 0
    for (before, step), counts in zip(itertools.pairwise(times), decoding[1:], strict=True):
        if counts:
            num_steps += 1
            for name, seconds in (*step.parts().items(), ("between_steps", step.start - before.end)):
                sums[name] = sums.get(name, 0.0) + seconds
    return {name: seconds / num_steps for name, seconds in sums.items()}


def _figures(rounds: _Rounds) -> dict[str, Any]:
    reads = {name: max(speeds[name] for speeds in rounds.read) / 1e9 for name in rounds.read[0]}
    parts = {name: _median(entry[name] for entry in rounds.parts) for name in rounds.parts[0]} if rounds.parts else {}
    kernels = [sum(s for name, s in entry.items() if name.startswith("kernel_")) for entry in rounds.parts]
    outside = [1 - inside / sum(entry.values()) for inside, entry in zip(kernels, rounds.parts, strict=True)]
    best_read = _median(max(speeds.values()) for speeds in rounds.read)
    return {
        "read_gb_per_second": best_read / 1e9,
        "read_gb_per_second_by_reader": reads,
        "linear": {
            str(size): {"seconds": _median(seconds), "tokens_per_second": size / _median(seconds)}
            for size, seconds in sorted(rounds.linear.items())
        },
        "decode": _shares(rounds.decode, rounds.decode_bound),
        "prefill": _shares(rounds.prefill, rounds.prefill_bound),
        "outside_kernels_share": _median(outside) if outside else None,
        "step_seconds": parts,
        "context": _context_figures(rounds.contexts, best_read),
    }


def _shares(rates: dict[int, list[float]], bounds: dict[int, list[float]]) -> dict[str, dict[str, float]]:
    return {
        str(size): {
            "tokens_per_second": _median(rates[size]),
            "bound_tokens_per_second": _median(bounds[size]),
            "share": _median(rate / bound for rate, bound in zip(rates[size], bounds[size], strict=True)),
        }
        for size in rates
    }


def _context_figures(measured: dict[int, list[ContextTimes]], read_bytes_per_second: float) -> dict[str, Any]:
    lengths = {}
    for context, times in measured.items():
        in_step = _median(item.kernel_s["paged_attention"] for item in times)
        lengths[str(context)] = {
            "step_seconds": _median(item.step_s for item in times),
            "attention_seconds": in_step,
            "attention_alone_seconds": _median(item.attention_alone_s for item in times),
            "kv_gb_per_second": times[0].num_kv_bytes / in_step / 1e9,
            "share_of_read": times[0].num_kv_bytes / in_step / read_bytes_per_second,
        }
    steps = [entry["step_seconds"] for entry in lengths.values()]
    return {"batch_size": _CONTEXT_BATCH, "lengths": lengths, "r_squared": _r_squared(list(measured), steps)}


def _r_squared(x: List[float], y: List[float]) -> float | None:
    """Share of the variance of ``y`` that a straight line over ``x`` explains; None of fewer than three points."""
    return None if len(x) < 3 else float(np.corrcoef(x, y)[0, 1] ** 2)


def _median(values: Iterable[float]) -> float:
    return float(median(values))


def _check_fits(core: EngineCore, longest: int) -> None:
    limit = core.model_runner.pool_size.max_model_len
    if longest > limit:
        raise ConfigError.for_value("longest sequence", longest, f"max_model_len is {limit}")


def _describe(core: EngineCore) -> dict[str, Any]:
    runner = core.model_runner
    return {"kernels": runner.kernels.name, "dtype": str(runner.dtype).removeprefix("torch.")}


def _forget_prefixes(core: EngineCore) -> None:
    core.scheduler.kv_cache_manager.reset_prefix_cache(core.scheduler.running)


def _do_nothing(*_: object) -> None:
    pass
