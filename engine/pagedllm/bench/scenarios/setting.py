"""What every scenario has at hand: engines to open, prompts to send, and a form for what it found."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ...api import CacheHints, Engine, GenerateRequest, ModelInfo, SamplingParams
from ...config import EngineConfig
from ...core import StepRecord
from ...errors import ConfigError
from ..load import Answer, ask_together
from ..timing import StepRecorder

__all__ = ["Bench", "OpenEngine", "Outcome", "Prompts", "Scenario", "ServeEngine", "Setting", "percentiles"]

_WARMUP_PROMPTS, _WARMUP_INPUT_LEN, _WARMUP_OUTPUT_LEN = 4, 64, 8


class OpenEngine(Protocol):
    """Loads an engine that is closed at the end of a ``with`` block and tells ``on_step`` about every step."""

    def __call__(
        self, config: EngineConfig, *, on_step: Callable[[StepRecord], None]
    ) -> AbstractContextManager[Engine]: ...


class ServeEngine(Protocol):
    """Serves an engine over HTTP until the end of a ``with`` block; gives the base URL of its API."""

    def __call__(self, engine: Engine) -> AbstractContextManager[str]: ...


class Prompts:
    """Random prompts of token ids, without EOS ids: some models treat what follows them differently."""

    def __init__(self, info: ModelInfo, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        eos_token_ids = np.array(sorted(info.eos_token_ids), dtype=np.int64)
        self._candidates = np.setdiff1d(np.arange(info.vocab_size), eos_token_ids)

    def draw(self, num_tokens: int) -> tuple[int, ...]:
        """A prompt; its first block is as good as never that of another."""
        return tuple(self.rng.choice(self._candidates, num_tokens).tolist())

    def request(
        self, input_len: int, output_len: int, *, prefix: tuple[int, ...] = (), hints: CacheHints | None = None
    ) -> GenerateRequest:
        """A greedy request of fixed length: ``input_len`` tokens after ``prefix``, and ``output_len`` generated."""
        return make_request((*prefix, *self.draw(input_len)), output_len, hints=hints)


def make_request(
    prompt: tuple[int, ...], output_len: int, *, hints: CacheHints | None = None, **sampling: Any
) -> GenerateRequest:
    """A request of fixed length, greedy unless ``sampling`` says otherwise."""
    options = {"temperature": 0.0, "ignore_eos": True, "max_tokens": output_len} | sampling
    return GenerateRequest(prompt=prompt, sampling=SamplingParams(**options), hints=hints or CacheHints())


@dataclass(frozen=True, kw_only=True)
class Bench:
    """An engine that is warm, with its steps and prompts of the scenario's seed."""

    engine: Engine
    info: ModelInfo
    prompts: Prompts
    recorder: StepRecorder

    def take_steps(self) -> list[StepRecord]:
        """The steps since the last call; only when nothing runs."""
        self.engine.stats()  # answered between two steps, so the last one has been recorded
        return self.recorder.take()

    def ask_together(self, requests: List[GenerateRequest]) -> list[Answer]:
        """Send all requests at once and wait for the answers."""
        return asyncio.run(ask_together(self.engine, requests))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a scenario runs.

    Args:
        config: What its engines have in common.
        open_engine: Loads one.
        serve: Puts one behind a URL.
        seed: Of the prompts; every engine gets the same.
    """

    config: EngineConfig
    open_engine: OpenEngine
    serve: ServeEngine
    seed: int = 0

    @contextmanager
    def engine(self, **changes: Any) -> Iterator[Bench]:
        """An engine of the common configuration with changes, closed at the end.

        One after the other: the threads of a second one would take the CPUs from the first.
        """
        recorder = StepRecorder()
        config = dataclasses.replace(self.config, **changes)
        with self.open_engine(config, on_step=recorder.record) as engine:
            info = engine.model_info()
            warmup = Prompts(info, self.seed + 1)
            bench = Bench(engine=engine, info=info, prompts=Prompts(info, self.seed), recorder=recorder)
            num_tokens = min(_WARMUP_INPUT_LEN, info.max_model_len - _WARMUP_OUTPUT_LEN)
            num_prompts = min(_WARMUP_PROMPTS, config.max_num_queued_reqs or _WARMUP_PROMPTS)
            bench.ask_together([warmup.request(num_tokens, _WARMUP_OUTPUT_LEN) for _ in range(num_prompts)])
            engine.reset_prefix_cache()
            bench.take_steps()
            yield bench


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a scenario found.

    Args:
        result: The figures; flat.
        series: What a plot shows besides: for each name one value per sample, or per bar.
    """

    result: dict[str, Any]
    series: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A named experiment.

    Args:
        plan: What is sent, by default; a frozen dataclass.
        run: Carries a plan out.
        draw: Draws an outcome into an empty matplotlib figure.
        own_options: Engine options that the scenario sets itself.
        scaled: Fields of the plan that a scale multiplies, with the least that makes sense for each.
    """

    name: str
    plan: Any
    run: Callable[[Setting, Any], Outcome]
    draw: Callable[[Any, Outcome], None]
    own_options: tuple[str, ...] = ()
    scaled: dict[str, int] = field(default_factory=dict)

    def scaled_plan(self, scale: float) -> Any:
        """The default plan with more or fewer requests."""
        changes = {name: max(least, round(getattr(self.plan, name) * scale)) for name, least in self.scaled.items()}
        return dataclasses.replace(self.plan, **changes)

    def check(self, config: EngineConfig) -> None:
        """Refuse what the scenario would not heed.

        Raises:
            ConfigError: An option has a value although the scenario sets it itself.
        """
        for item in dataclasses.fields(EngineConfig):
            value = getattr(config, item.name)
            if item.name in self.own_options and value != item.default:
                raise ConfigError.for_value(
                    item.name, value, f"is set by the scenario {self.name} itself; leave it out"
                )


def percentiles(name: str, values_s: List[float]) -> dict[str, float]:
    """P50, P95 and P99 of times, in ms: ``{"itl_p50_ms": 12.5, ...}``."""
    found = np.percentile(values_s, [50, 95, 99]) * 1000
    return {f"{name}_p{share}_ms": round(float(value), 3) for share, value in zip((50, 95, 99), found, strict=True)}
