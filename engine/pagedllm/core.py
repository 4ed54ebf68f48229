"""The engine's loop, one step at a time: schedule, run, update, emit."""

from __future__ import annotations

import time

from .api import Chunk, EngineStats, Timings, Usage
from .compute.forward_batch import ForwardBatch
from .compute.model_runner import ModelRunner
from .compute.sampler import Sampler
from .control.scheduler import Scheduler
from .control.sequence import Sequence
from .text.output_processor import OutputText
from .text.tokenizer import Tokenizer

__all__ = ["EngineCore"]


class EngineCore:
    """Scheduler, model and text put together. Not thread-safe: one thread owns it."""

    def __init__(self, scheduler: Scheduler, model_runner: ModelRunner, sampler: Sampler, tokenizer: Tokenizer) -> None:
        self.scheduler = scheduler
        self.model_runner = model_runner
        self.sampler = sampler
        self.tokenizer = tokenizer
        self._texts: dict[Sequence, OutputText] = {}
        self._num_steps = 0
        self._num_generated_tokens = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; raises ContextLengthError if it could never fit."""
        self.scheduler.add(sequence)
        self._texts[sequence] = OutputText(self.tokenizer, sequence.sampling.stop)

    def abort(self, request_id: str) -> list[Chunk]:
        """End a request now; returns the last chunk of each of its choices."""
        return [self._emit(sequence, ()) for sequence in self.scheduler.abort(request_id)]

    def step(self) -> list[Chunk]:
        """Advance every scheduled sequence; returns what is new for their consumers."""
        output = self.scheduler.schedule()
        assert output.scheduled, "there is work, but nothing could be scheduled"
        batch = ForwardBatch.build(output.scheduled, self.scheduler.kv_cache_manager.block_size)
        logits = self.model_runner.run(batch)
        token_ids = self.sampler(logits, output.sampled)
        self.scheduler.update(output, token_ids)
        chunks = [self._emit(sequence, sequence.token_ids[-1:]) for sequence in output.sampled]
        self.scheduler.retire_finished()
        self._num_steps += 1
        self._num_generated_tokens += len(token_ids)
        return chunks

    def stats(self) -> EngineStats:
        scheduler, manager = self.scheduler, self.scheduler.kv_cache_manager
        usage = manager.usage
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_running_peak=scheduler.num_running_peak,
            num_blocks=usage.num_blocks,
            num_free_blocks=usage.num_free,
            num_cached_blocks=usage.num_cached,
            num_referenced_blocks=usage.num_referenced,
            prefix_queries=manager.prefix_queries,
            prefix_hits=manager.prefix_hits,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self._num_steps,
            num_generated_tokens=self._num_generated_tokens,
        )

    def _emit(self, sequence: Sequence, token_ids: list[int] | tuple[()]) -> Chunk:
        """The chunk for new tokens. Marks the sequence finished if its text has reached a stop string."""
        # An EOS or stop token ends the text without being part of it.
        shown = () if sequence.ended_on_token else token_ids
        delta = self._texts[sequence].append(shown, is_last=sequence.is_finished)
        if delta.stop is not None:
            sequence.finish("stop", delta.stop)
        if sequence.is_finished:
            del self._texts[sequence]
        return Chunk(
            request_id=sequence.request_id,
            text=delta.text,
            token_ids=tuple(token_ids),
            index=sequence.index,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            usage=_usage(sequence) if sequence.is_finished else None,
            timings=_timings(sequence) if sequence.is_finished else None,
        )


def _usage(sequence: Sequence) -> Usage:
    return Usage(
        prompt_tokens=sequence.num_prompt_tokens,
        completion_tokens=sequence.num_output_tokens,
        cached_tokens=sequence.num_cached_tokens or 0,
    )


def _timings(sequence: Sequence) -> Timings:
    """An aborted request may lack a first step or token; what it waited for then lasted until now."""
    now = time.monotonic()
    return Timings(
        queue_s=(sequence.first_scheduled_time or now) - sequence.arrival_time,
        ttft_s=(sequence.first_token_time or now) - sequence.arrival_time,
        total_s=now - sequence.arrival_time,
    )
