"""The engine's loop, one step at a time: schedule, run, update, emit."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, replace

from torch import Tensor

from .api import Chunk, EngineStats, Timings, TokenLogprob, Usage
from .compute.forward_batch import ForwardBatch, PromptRow
from .compute.model_runner import ModelRunner
from .compute.sampler import Sampler, Score
from .constraints import Constraints
from .control.engine_stats import collect_stats
from .control.pressure_log import PressureLog
from .control.scheduler import Scheduler, SchedulerOutput
from .control.sequence import Sequence
from .errors import InvalidRequestError
from .text.answer import AnswerForm, AnswerText
from .text.tokenizer import Tokenizer

__all__ = ["EngineCore", "StepRecord"]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one step did, for benchmarks and traces.

    Args:
        step: Counted from 1.
        time_s: When it began, on the monotonic clock.
        num_admitted: Sequences that began or resumed.
        num_tokens: Tokens computed.
        num_running: Sequences that go on after it.
        kv_cache_usage: Share of the KV pool that running sequences hold after it, 0 to 1.
    """

    step: int
    time_s: float
    duration_s: float
    num_admitted: int
    num_retired: int
    num_preempted: int
    num_tokens: int
    num_running: int
    num_waiting: int
    kv_cache_usage: float


class EngineCore:
    """Scheduler, model and text put together. Not thread-safe: one thread owns it.

    Args:
        on_step: Told about every step, by the owning thread; it must be quick.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        model_runner: ModelRunner,
        sampler: Sampler,
        tokenizer: Tokenizer,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.model_runner = model_runner
        self.sampler = sampler
        self.tokenizer = tokenizer
        self._requests: dict[str, _OpenRequest] = {}
        self._on_step = on_step
        self._num_steps = 0
        self._num_generated_tokens = 0
        self._num_timed_out = 0
        self._pressure = PressureLog()
        self._constraints = Constraints()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, sequences: List[Sequence]) -> None:
        """Queue a request's choices, the leader first.

        Raises:
            ContextLengthError: They could never fit.
            QueueFullError: As many requests wait as may.
        """
        self.scheduler.add(sequences)
        leader, form = sequences[0], sequences[0].answer_form
        assert form is None or isinstance(form, AnswerForm)
        self._requests[leader.request_id] = _OpenRequest(
            choices=tuple(sequences),
            texts=tuple(
                AnswerText(self.tokenizer, leader.sampling.stop, form, index) for index in range(len(sequences))
            ),
            prompt_logprobs=None if leader.sampling.prompt_logprobs is None else [None] * leader.num_prompt_tokens,
            num_open=len(sequences),
        )

    def abort(self, request_id: str) -> list[Chunk]:
        """End a request now; returns the last chunk of each of its open choices."""
        return [self._emit(sequence, None) for sequence in self.scheduler.abort(request_id)]

    def step(self) -> list[Chunk]:
        """Advance every scheduled sequence; returns what is new for their consumers."""
        start = time.monotonic()
        output = self.scheduler.schedule()
        assert output.sequences, "there is work, but nothing could be scheduled"
        if output.copies:
            self.model_runner.copy_blocks(output.copies)
        batch = ForwardBatch.build(output.sequences, output.nums_new_tokens, self.scheduler.kv_cache_manager.block_size)
        logits = self.model_runner.run(batch)
        sampled_logits, prompt_logits = logits.split([len(output.sampled), len(batch.prompt_rows)])
        matchers = [self._requests[item.request_id].texts[item.index].matcher for item in output.sampled]
        token_ids = self._constraints.sample(self.sampler, sampled_logits, output.sampled, matchers)
        logprobs = self._score_sampled(sampled_logits, output.sampled, token_ids)
        self._score_prompts(prompt_logits, batch.prompt_rows)
        self.scheduler.update(output, token_ids)
        self._constraints.advance(output.sampled, matchers)
        chunks = [self._emit(sequence, logprobs.get(sequence), new=True) for sequence in output.sampled]
        warmed = [sequence for sequence in output.sequences if not sequence.generates]
        chunks += [self._emit(sequence, None) for sequence in warmed if sequence.is_finished]
        num_retired = self.scheduler.retire_finished()
        self._watch(output, time.monotonic() - start)
        self._num_steps += 1
        self._num_generated_tokens += len(token_ids)
        if self._on_step is not None:
            self._on_step(self._record(output, num_retired, start))
        return chunks

    def take_failures(self) -> dict[str, InvalidRequestError]:
        """End the requests that cannot be gone on with; returns why. What they were is known to nobody any more."""
        failures: dict[str, InvalidRequestError] = {}
        for request_id, reason in self._constraints.take_failures().items():
            if self._requests.pop(request_id, None) is not None:
                self.scheduler.abort(request_id)
                message = f"the answer's grammar is too hard to follow: {reason}"
                failures[request_id] = InvalidRequestError(message, param="structured_output")
        return failures

    def expire_queue(self, timeout_s: float) -> list[str]:
        """End the requests that have waited longer than a time without being computed; returns which."""
        late = self.scheduler.waiting.timed_out(time.monotonic() - timeout_s)
        request_ids = list(dict.fromkeys(sequence.request_id for sequence in late))
        for request_id in request_ids:
            self.scheduler.abort(request_id)
            del self._requests[request_id]
        self._num_timed_out += len(request_ids)
        return request_ids

    def stats(self) -> EngineStats:
        return collect_stats(
            self.scheduler,
            num_steps=self._num_steps,
            num_generated_tokens=self._num_generated_tokens,
            num_timed_out=self._num_timed_out,
        )

    def _watch(self, output: SchedulerOutput, duration_s: float) -> None:
        """Learn from a step how fast prompts are computed, and say when memory is short."""
        num_prefill_tokens = output.num_prefill_tokens
        self.scheduler.swap_choice.observe_step(num_prefill_tokens, output.num_tokens, duration_s)
        if self.scheduler.step_cost is not None:
            self.scheduler.step_cost.observe(output.num_tokens - num_prefill_tokens, num_prefill_tokens, duration_s)
        self._pressure.observe(self.scheduler.kv_cache_manager.usage, output.num_preempted)

    def _record(self, output: SchedulerOutput, num_retired: int, start: float) -> StepRecord:
        usage = self.scheduler.kv_cache_manager.usage
        return StepRecord(
            step=self._num_steps,
            time_s=start,
            duration_s=time.monotonic() - start,
            num_admitted=output.num_admitted,
            num_retired=num_retired,
            num_preempted=output.num_preempted,
            num_tokens=output.num_tokens,
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            kv_cache_usage=usage.num_referenced / usage.num_blocks,
        )

    def _score_sampled(
        self, logits: Tensor, sequences: List[Sequence], token_ids: List[int]
    ) -> dict[Sequence, TokenLogprob]:
        """Log probabilities of the new tokens, for those who asked."""
        rows = [i for i, sequence in enumerate(sequences) if sequence.sampling.logprobs is not None]
        if not rows:
            return {}
        nums_top = [sequences[i].sampling.logprobs or 0 for i in rows]
        scores = self.sampler.score(logits[rows], [token_ids[i] for i in rows], nums_top)
        return {sequences[i]: self._to_logprob(score) for i, score in zip(rows, scores, strict=True)}

    def _score_prompts(self, logits: Tensor, rows: List[PromptRow]) -> None:
        """Note the log probabilities of prompt tokens that this step computed."""
        if not rows:
            return
        token_ids = [row.sequence.token_ids[row.position] for row in rows]
        nums_top = [row.sequence.sampling.prompt_logprobs or 0 for row in rows]
        for row, score in zip(rows, self.sampler.score(logits, token_ids, nums_top), strict=True):
            prompt_logprobs = self._requests[row.sequence.request_id].prompt_logprobs
            assert prompt_logprobs is not None
            prompt_logprobs[row.position] = self._to_logprob(score)

    def _to_logprob(self, score: Score) -> TokenLogprob:
        def text_of(token_id: int) -> str:
            return self.tokenizer.decode([token_id], skip_special_tokens=False)

        top = tuple(TokenLogprob(token_id, text_of(token_id), logprob) for token_id, logprob in score.top)
        return TokenLogprob(score.token_id, text_of(score.token_id), score.logprob, top)

    def _emit(self, sequence: Sequence, logprob: TokenLogprob | None, *, new: bool = False) -> Chunk:
        """The chunk for a new token, or for none. Marks a sequence finished if its text has reached a stop string."""
        request = self._requests[sequence.request_id]
        token_ids = tuple(sequence.token_ids[-1:]) if new else ()
        # An EOS or stop token ends the text without being part of it.
        shown = () if sequence.ended_on_token else token_ids
        may_stop = sequence.num_output_tokens > sequence.sampling.min_tokens
        text = request.texts[sequence.index]
        delta = text.append(shown, is_last=sequence.is_finished, may_stop=may_stop)
        if delta.stop is not None:
            sequence.finish("stop", delta.stop)
        chunk = Chunk(
            request_id=sequence.request_id,
            text=delta.text,
            token_ids=token_ids,
            index=sequence.index,
            logprobs=None if logprob is None else (logprob,),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            reasoning=delta.reasoning,
            tool_calls=delta.tool_calls,
        )
        if sequence.finish_reason == "stop" and text.has_whole_calls:
            chunk = replace(chunk, finish_reason="tool_calls")
        return self._close(request, chunk) if sequence.is_finished else chunk

    def _close(self, request: _OpenRequest, chunk: Chunk) -> Chunk:
        """Count a finished choice; the request's last chunk gets what concerns the request as a whole."""
        request.num_open -= 1
        if request.num_open > 0:
            return chunk
        del self._requests[chunk.request_id]
        leader = request.choices[0]
        self.scheduler.hint_keeper.on_end(leader)
        prompt_logprobs = None if request.prompt_logprobs is None else tuple(request.prompt_logprobs)
        return replace(
            chunk,
            prompt_logprobs=prompt_logprobs,
            usage=_usage(request),
            timings=_timings(leader),
            hints=tuple(leader.outcomes),
        )


@dataclass
class _OpenRequest:
    """What the engine keeps of a request until its last choice has ended.

    Args:
        choices: Its sequences, in order of their index.
        texts: The text of each.
        prompt_logprobs: By position, as far as they are computed; None if they are not asked for.
        num_open: Choices that have not ended.
    """

    choices: tuple[Sequence, ...]
    texts: tuple[AnswerText, ...]
    prompt_logprobs: list[TokenLogprob | None] | None
    num_open: int


def _usage(request: _OpenRequest) -> Usage:
    choices = request.choices
    return Usage(
        prompt_tokens=choices[0].num_prompt_tokens,
        completion_tokens=sum(sequence.num_output_tokens for sequence in choices),
        cached_tokens=choices[0].num_cached_tokens or 0,
        cache_creation_tokens=choices[0].num_created_tokens,
        reasoning_tokens=sum(text.num_reasoning_tokens for text in request.texts),
    )


def _timings(leader: Sequence) -> Timings:
    """An aborted request may lack a first step or token; what it waited for then lasted until now."""
    now = time.monotonic()
    return Timings(
        queue_s=(leader.first_scheduled_time or now) - leader.arrival_time,
        ttft_s=(leader.first_token_time or now) - leader.arrival_time,
        total_s=now - leader.arrival_time,
    )
