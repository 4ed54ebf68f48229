"""An engine without a model: obeys the Engine protocol, and its text is a pure function of the request."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

from fake_run import Run, hint_outcomes, plan_answer
from fake_text import EOS, scripted_logprob

from pagedllm.api import (
    Chunk,
    EngineStats,
    GenerateRequest,
    Health,
    ModelInfo,
    RequestOutput,
    Timings,
    Usage,
)
from pagedllm.assemble import assemble_output
from pagedllm.errors import (
    ContextLengthError,
    EngineClosedError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    PagedLLMError,
    QueueFullError,
)

__all__ = ["FakeEngine"]


class FakeEngine:
    """Answers at once, or with ``delay_s`` per step.

    Args:
        model: What ``model_info`` says.
        max_model_len: Longest sequence in tokens; a token is a character.
        chunk_size: Characters per streamed chunk.
        delay_s: Pause before each step; all requests of one ``generate`` step together.
        errors: Error for every prompt that contains the key.
        late_errors: Likewise, raised after the first chunk.
        max_open: Most requests in flight; more are a QueueFullError.

    Attributes:
        requests: All requests, in the order of their arrival.
        batches: The number of requests in each ``generate`` and ``agenerate``.
        num_aborts: Requests that ended before they were done.
        num_running_peak: Most requests in flight at once.
        is_stuck: While set, ``astats`` gives no answer.
    """

    def __init__(
        self,
        *,
        model: str = "fake",
        max_model_len: int = 4096,
        chunk_size: int = 4,
        delay_s: float = 0.0,
        block_size: int = 16,
        errors: Mapping[str, PagedLLMError] | None = None,
        late_errors: Mapping[str, PagedLLMError] | None = None,
        max_open: int | None = None,
    ) -> None:
        self._info = ModelInfo(
            model=model,
            architecture="fake",
            dtype="float32",
            kernels="none",
            vocab_size=EOS + 1,
            max_model_len=max_model_len,
            eos_token_ids=(EOS,),
            has_chat_template=True,
            block_size=block_size,
            num_blocks=1 << 16,
            kv_bytes_per_token=4,
        )
        self.chunk_size, self.delay_s = chunk_size, delay_s
        self.errors, self.late_errors = dict(errors or {}), dict(late_errors or {})
        self.max_open = max_open
        self.is_stuck = False
        self.requests: list[GenerateRequest] = []
        self.batches: list[int] = []
        self.num_aborts = 0
        self.num_running_peak = 0
        self._lock = threading.RLock()
        self._running: dict[str, Run] = {}
        self._cached: set[tuple[str | None, tuple[int, ...]]] = set()
        self._failure: EngineError | None = None
        self._prefix_queries = self._prefix_hits = self._num_steps = self._num_generated_tokens = 0

    # --- Engine ---

    def generate(self, requests: Sequence[GenerateRequest]) -> list[RequestOutput | PagedLLMError]:
        runs = self._start_all(requests)
        collected: dict[int, list[Chunk]] = {index: [] for index in range(len(runs))}
        try:
            while any(isinstance(run, Run) and not run.ended for run in runs):
                time.sleep(self.delay_s)
                self._step_all(runs, collected)
            return self._outputs(runs, collected)
        finally:
            self._release(runs)

    async def agenerate(self, requests: Sequence[GenerateRequest]) -> list[RequestOutput | PagedLLMError]:
        runs = self._start_all(requests)
        collected: dict[int, list[Chunk]] = {index: [] for index in range(len(runs))}
        try:
            while any(isinstance(run, Run) and not run.ended for run in runs):
                await asyncio.sleep(self.delay_s)
                self._step_all(runs, collected)
            return self._outputs(runs, collected)
        finally:
            self._release(runs)

    def stream(self, request: GenerateRequest) -> Iterator[Chunk]:
        run = self._start(request)
        try:
            while not run.ended:
                time.sleep(self.delay_s)
                yield self._step(run)
        finally:
            self._release([run])

    async def astream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        run = self._start(request)
        try:
            while not run.ended:
                await asyncio.sleep(self.delay_s)
                yield self._step(run)
        finally:
            self._release([run])

    def abort(self, request_id: str) -> None:
        with self._lock:
            if request_id in self._running:
                self._running[request_id].abort()

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(char) for char in text]

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token_id) for token_id in token_ids if token_id != EOS)

    def count_tokens(self, request: GenerateRequest) -> int:
        return len(self._encode(request))

    def model_info(self) -> ModelInfo:
        return self._info

    def health(self) -> Health:
        return Health(ok=self._failure is None, reason=str(self._failure or ""))

    def stats(self) -> EngineStats:
        self._check_usable()
        with self._lock:
            size, total = self._info.block_size, self._info.num_blocks
            referenced = sum(len(run.prompt_ids) // size + 1 for run in self._running.values())
            cached = min(len(self._cached), total - referenced)
            return EngineStats(
                num_running=len(self._running),
                num_waiting=0,
                num_running_peak=self.num_running_peak,
                num_blocks=total,
                num_free_blocks=total - referenced - cached,
                num_cached_blocks=cached,
                num_referenced_blocks=referenced,
                prefix_queries=self._prefix_queries,
                prefix_hits=self._prefix_hits,
                num_preemptions=0,
                num_steps=self._num_steps,
                num_generated_tokens=self._num_generated_tokens,
            )

    async def astats(self) -> EngineStats:
        while self.is_stuck:
            await asyncio.sleep(0.005)
        return self.stats()

    def match_prefix(self, request: GenerateRequest) -> int:
        self._check_usable()
        return self._match(request.hints.salt, self._encode(request))

    async def amatch_prefix(self, request: GenerateRequest) -> int:
        return self.match_prefix(request)

    def warm(self, request: GenerateRequest) -> RequestOutput:
        warming = dataclasses.replace(request, hints=dataclasses.replace(request.hints, warm=True))
        run = self._start(warming)
        with self._lock:
            return assemble_output([self._step(run) for _ in run.pieces])

    async def awarm(self, request: GenerateRequest) -> RequestOutput:
        return self.warm(request)

    def reset_prefix_cache(self) -> None:
        self._check_usable()
        self._cached.clear()

    async def areset_prefix_cache(self) -> None:
        self.reset_prefix_cache()

    def close(self) -> None:
        self._failure = self._failure or EngineClosedError("the engine was closed")

    async def aclose(self) -> None:
        self.close()

    # --- Script ---

    def die(self, cause: BaseException) -> None:
        """Fail all that is in flight and all that comes, as an engine whose worker died."""
        self._failure = EngineDeadError(f"the engine's worker died: {cause}")
        self._failure.__cause__ = cause

    # --- Inside ---

    def _start_all(self, requests: Sequence[GenerateRequest]) -> list[Run | PagedLLMError]:
        self._check_usable()
        self.batches.append(len(requests))
        return [self._try_start(request) for request in requests]

    def _try_start(self, request: GenerateRequest) -> Run | PagedLLMError:
        try:
            return self._start(request)
        except PagedLLMError as error:
            return error

    def _start(self, request: GenerateRequest) -> Run:
        self._check_usable()
        with self._lock:
            self.requests.append(request)
            prompt_ids = self._encode(request)
            self._check(request, prompt_ids)
            cached_tokens = self._match(request.hints.salt, prompt_ids)
            self._prefix_queries += len(prompt_ids)
            self._prefix_hits += cached_tokens
            limit = self._info.max_model_len
            plan = plan_answer(request, prompt_ids, chunk_size=self.chunk_size, max_model_len=limit)
            run = Run(request, prompt_ids, plan, cached_tokens)
            self._running[request.request_id] = run
            self.num_running_peak = max(self.num_running_peak, len(self._running))
            return run

    def _check(self, request: GenerateRequest, prompt_ids: tuple[int, ...]) -> None:
        limit, num_new = self._info.max_model_len, request.sampling.max_tokens or 1
        if len(prompt_ids) >= limit:
            raise ContextLengthError(
                f"the prompt has {len(prompt_ids)} tokens, max_model_len is {limit}", param="prompt"
            )
        if len(prompt_ids) + num_new > limit:
            total = len(prompt_ids) + num_new
            raise ContextLengthError(
                f"prompt and max_tokens make {total}, max_model_len is {limit}", param="max_tokens"
            )
        if any(not 0 <= token_id <= EOS for token_id in (*prompt_ids, *request.sampling.stop_token_ids)):
            raise InvalidRequestError("a token id is outside the vocabulary", param="prompt")
        if self.max_open is not None and len(self._running) >= self.max_open:
            raise QueueFullError(f"{self.max_open} requests are in flight")
        if request.request_id in self._running:
            raise InvalidRequestError(f"request_id {request.request_id!r} is in flight already", param="request_id")
        prompt = self.detokenize(prompt_ids)
        for key, error in self.errors.items():
            if key in prompt:
                raise error

    def _encode(self, request: GenerateRequest) -> tuple[int, ...]:
        if isinstance(request.prompt, tuple):
            return request.prompt
        if request.prompt is not None:
            return tuple(self.tokenize(request.prompt))
        turns = [f"<{message.role}>{message.content}\n" for message in request.messages or ()]
        tools = [f"<tool>{tool.name}{tool.description}{tool.parameters}\n" for tool in request.tools]
        return tuple(self.tokenize("".join([*tools, *turns, "<assistant>"])))

    def _step_all(self, runs: Sequence[Run | PagedLLMError], collected: dict[int, list[Chunk]]) -> None:
        for index, run in enumerate(runs):
            if isinstance(run, Run) and not run.ended:
                collected[index].append(self._step(run))

    def _step(self, run: Run) -> Chunk:
        """The next chunk; a choice's last has no text, and the request's last tells of it as a whole."""
        self._check_usable()
        with self._lock:
            self._num_steps += 1
            run.first_token = run.first_token or time.perf_counter()
            self._raise_late_error(run)
            piece, params = run.pieces[run.num_emitted], run.request.sampling
            run.num_emitted += 1
            run.num_tokens += len(piece.token_ids)
            self._num_generated_tokens += len(piece.token_ids)
            num_top = params.logprobs
            chunk = Chunk(
                request_id=run.request.request_id,
                text=piece.text,
                token_ids=piece.token_ids,
                index=piece.index,
                tool_calls=piece.tool_calls,
                logprobs=None if num_top is None else tuple(scripted_logprob(i, num_top) for i in piece.token_ids),
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
            )
            return self._close(run, chunk) if run.ended else chunk

    def _close(self, run: Run, chunk: Chunk) -> Chunk:
        now, num_top = time.perf_counter(), run.request.sampling.prompt_logprobs
        assert run.first_token is not None
        self._finish(run)
        rest = () if num_top is None else tuple(scripted_logprob(i, num_top) for i in run.prompt_ids[1:])
        return dataclasses.replace(
            chunk,
            prompt_logprobs=None if num_top is None else (None, *rest),
            usage=Usage(
                prompt_tokens=len(run.prompt_ids), completion_tokens=run.num_tokens, cached_tokens=run.cached_tokens
            ),
            timings=Timings(queue_s=0.0, ttft_s=run.first_token - run.arrived, total_s=now - run.arrived),
            hints=hint_outcomes(run, self._info.block_size),
        )

    def _raise_late_error(self, run: Run) -> None:
        if run.num_emitted:
            prompt = self.detokenize(run.prompt_ids)
            for key, error in self.late_errors.items():
                if key in prompt:
                    raise error

    def _finish(self, run: Run) -> None:
        self._running.pop(run.request.request_id, None)
        self.num_aborts += run.aborted
        computed = run.prompt_ids
        if not run.aborted:
            first = tuple(token_id for piece in run.pieces if piece.index == 0 for token_id in piece.token_ids)
            computed += first[:-1]
        for end in range(self._info.block_size, len(computed) + 1, self._info.block_size):
            self._cached.add((run.request.hints.salt, computed[:end]))

    def _outputs(
        self, runs: Sequence[Run | PagedLLMError], collected: dict[int, list[Chunk]]
    ) -> list[RequestOutput | PagedLLMError]:
        return [
            run if isinstance(run, PagedLLMError) else assemble_output(collected[index])
            for index, run in enumerate(runs)
        ]

    def _release(self, runs: Sequence[Run | PagedLLMError]) -> None:
        """Abort what its consumer left before the end."""
        with self._lock:
            for run in runs:
                if isinstance(run, Run) and not run.ended:
                    run.aborted = True
                    run.num_emitted = len(run.pieces)
                    self._finish(run)

    def _match(self, salt: str | None, token_ids: tuple[int, ...]) -> int:
        """Cached prompt tokens: whole blocks, and never all, since one token must be computed."""
        size, matched = self._info.block_size, 0
        while matched + size < len(token_ids) and (salt, token_ids[: matched + size]) in self._cached:
            matched += size
        return matched

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args) from self._failure.__cause__
