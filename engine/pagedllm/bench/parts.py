"""An engine whose parts are timed: where each step's time goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagedllm_kernels.interface import Kernels, LayerStack, Linear, StackKernels, StackLayer, StackShape

from ..compute.forward_batch import ForwardBatch
from ..compute.model_runner import ModelRunner
from ..compute.sampler import Sampler
from ..config import EngineConfig, StepLimits
from ..control.kv_cache_manager import KVCacheManager
from ..control.scheduler import Scheduler, SchedulerOutput
from ..core import EngineCore, StepRecord
from ..files.locate import ModelFiles
from ..text.tokenizer import Tokenizer

__all__ = ["StepTimes", "TimedKernels", "Timeline", "build_timed_core"]


class TimedKernels:
    """Implements ``Kernels`` and ``StackKernels`` by others, and adds up the seconds of each operation in ``seconds``.

    The products of a stack stand under ``linear`` with what it fuses into them; its operations are timed by itself.
    """

    def __init__(self, kernels: Kernels) -> None:
        self.name = kernels.name
        self.seconds: dict[str, float] = {}
        self._kernels = kernels

    def prepare_linear(self, weight: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Linear:
        return _TimedLinear(self._timed, self._kernels.prepare_linear(weight, bias, dtype=dtype))

    def prepare_stack(self, layers: List[StackLayer], shape: StackShape) -> LayerStack | None:
        if not isinstance(self._kernels, StackKernels):
            return None
        bare = [
            replace(
                layer,
                **{name: getattr(layer, name).linear for name in ("qkv", "attention_output", "gate_up", "down")},
            )
            for layer in layers
        ]
        stack = self._kernels.prepare_stack(bare, shape)
        return None if stack is None else _TimedStack(stack, self.seconds)

    def add_rms_norm(self, *args: Any) -> Tensor:
        return self._timed("add_rms_norm", self._kernels.add_rms_norm, *args)

    def norm_heads(self, *args: Any) -> None:
        self._timed("norm_heads", self._kernels.norm_heads, *args)

    def rope_store(self, *args: Any) -> None:
        self._timed("rope_store", self._kernels.rope_store, *args)

    def paged_attention(self, *args: Any, **options: Any) -> Tensor:
        return self._timed("paged_attention", self._kernels.paged_attention, *args, **options)

    def gated_activation(self, gate_up: Tensor, *, gelu: bool) -> Tensor:
        return self._timed("gated_activation", self._kernels.gated_activation, gate_up, gelu=gelu)

    # Not timed by themselves: they are what the sampler's time is.
    def greedy(self, logits: Tensor) -> Tensor:
        return self._kernels.greedy(logits)

    def sample(self, *args: Tensor) -> Tensor:
        return self._kernels.sample(*args)

    def _timed(self, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **options)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        return result


@dataclass(frozen=True, slots=True)
class _TimedLinear:
    timed: Callable[..., Any]
    linear: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.timed("linear", self.linear, x)


class _TimedStack:
    """Implements ``LayerStack``; adds what a call took to the seconds of all kernels."""

    def __init__(self, stack: LayerStack, seconds: dict[str, float]) -> None:
        self._stack = stack
        self._total = seconds

    @property
    def seconds(self) -> Mapping[str, float]:
        return self._stack.seconds

    def __call__(self, *args: Any, **options: Any) -> None:
        before = self._stack.seconds
        self._stack(*args, **options)
        for name, seconds in self._stack.seconds.items():
            self._total[name] = self._total.get(name, 0.0) + seconds - before[name]


class StepTimes:
    """One step: when each part began and ended, and what the kernels took of it.

    Args:
        kernels: Seconds by operation.
    """

    def __init__(self) -> None:
        self.marks: dict[str, float] = {}
        self.kernels: dict[str, float] = {}

    @property
    def start(self) -> float:
        return self.marks["schedule"]

    @property
    def end(self) -> float:
        return self.marks["retired"]

    def parts(self) -> dict[str, float]:
        """Seconds by part; together they are the whole step."""
        marks, in_kernels = self.marks, sum(self.kernels.values())
        model = marks["ran"] - marks["run"]
        bookkeeping = marks["scheduled"] - marks["schedule"] + marks["updated"] - marks["update"]
        return {
            **{f"kernel_{name}": seconds for name, seconds in self.kernels.items()},
            "between_kernels": model - in_kernels,
            "scheduler": bookkeeping + marks["retired"] - marks["retire"],
            "forward_batch": marks["run"] - marks["scheduled"],
            "sampler": marks["update"] - marks["ran"],
            "detokenizer": marks["retire"] - marks["updated"],
        }


class Timeline:
    """The steps of an engine as its timed parts see them. Written by the engine's thread."""

    def __init__(self) -> None:
        self._steps: list[StepTimes] = []

    def begin(self) -> None:
        self._steps.append(StepTimes())
        self.mark("schedule")

    def mark(self, name: str) -> None:
        if self._steps:
            self._steps[-1].marks[name] = time.perf_counter()

    def note_kernels(self, seconds: dict[str, float]) -> None:
        if self._steps:
            self._steps[-1].kernels = seconds

    def take(self) -> list[StepTimes]:
        """The steps since the last call. Between batches only."""
        steps, self._steps = self._steps, []
        return steps


class _TimedScheduler(Scheduler):
    def __init__(self, timeline: Timeline, manager: KVCacheManager, limits: StepLimits) -> None:
        super().__init__(
            manager, max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens
        )
        self._timeline = timeline

    def schedule(self) -> SchedulerOutput:
        self._timeline.begin()
        output = super().schedule()
        self._timeline.mark("scheduled")
        return output

    def update(self, output: SchedulerOutput, token_ids: List[int]) -> None:
        self._timeline.mark("update")
        super().update(output, token_ids)
        self._timeline.mark("updated")

    def retire_finished(self) -> int:
        self._timeline.mark("retire")
        num_retired = super().retire_finished()
        self._timeline.mark("retired")
        return num_retired


class _TimedRunner(ModelRunner):
    def __init__(self, timeline: Timeline, config: EngineConfig, files: ModelFiles) -> None:
        super().__init__(config, files, wrap_kernels=TimedKernels)
        self._timeline = timeline

    def run(self, batch: ForwardBatch) -> Tensor:
        assert isinstance(self.kernels, TimedKernels)
        self.kernels.seconds.clear()
        self._timeline.mark("run")
        logits = super().run(batch)
        self._timeline.mark("ran")
        self._timeline.note_kernels(dict(self.kernels.seconds))
        return logits


def build_timed_core(
    timeline: Timeline,
    config: EngineConfig,
    files: ModelFiles,
    tokenizer: Tokenizer,
    on_step: Callable[[StepRecord], None],
) -> EngineCore:
    """The core of an engine, in the thread that is to run it."""
    runner = _TimedRunner(timeline, config, files)
    manager = KVCacheManager(
        num_blocks=runner.pool_size.num_blocks,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    return EngineCore(
        _TimedScheduler(timeline, manager, runner.limits), runner, Sampler(runner.kernels), tokenizer, on_step
    )
