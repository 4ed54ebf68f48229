"""An engine without a model: obeys the Engine protocol, and its text is a pure function of the request."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fake_text import EOS, scripted_answer

from pagedllm.api import (
    Choice,
    Chunk,
    EngineStats,
    FinishReason,
    GenerateRequest,
    Health,
    ModelInfo,
    RequestOutput,
    Timings,
    Usage,
)
from pagedllm.errors import (
    ContextLengthError,
    EngineClosedError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    PagedLLMError,
)

__all__ = ["FakeEngine"]


@dataclass
class _Run:
    """One request from arrival to its end. The whole answer is known at the start and handed out piece by piece."""

    request: GenerateRequest
    prompt_ids: tuple[int, ...]
    pieces: list[str]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    cached_tokens: int
    arrived: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    num_emitted: int = 0
    aborted: bool = False

    @property
    def ended(self) -> bool:
        return self.num_emitted > len(self.pieces)


class FakeEngine:
    """Answers at once, or with ``delay_s`` per step.

    Args:
        model: What ``model_info`` says.
        max_model_len: Longest sequence in tokens; a token is a character.
        chunk_size: Characters per streamed chunk.
        delay_s: Pause before each step; all requests of one ``generate`` step together.
        errors: Error for every prompt that contains the key.

    Attributes:
        requests: All requests, in the order of their arrival.
        batches: The number of requests in each ``generate`` and ``agenerate``.
        num_aborts: Requests that ended before they were done.
        num_running_peak: Most requests in flight at once.
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
        self.errors = dict(errors or {})
        self.requests: list[GenerateRequest] = []
        self.batches: list[int] = []
        self.num_aborts = 0
        self.num_running_peak = 0
        self._lock = threading.RLock()
        self._running: dict[str, _Run] = {}
        self._cached: set[tuple[str | None, tuple[int, ...]]] = set()
        self._failure: EngineError | None = None
        self._prefix_queries = self._prefix_hits = self._num_steps = self._num_generated_tokens = 0

    # --- Engine ---

    def generate(self, requests: Sequence[GenerateRequest]) -> list[RequestOutput | PagedLLMError]:
        runs = self._start_all(requests)
        collected: dict[int, list[Chunk]] = {index: [] for index in range(len(runs))}
        try:
            while any(isinstance(run, _Run) and not run.ended for run in runs):
                time.sleep(self.delay_s)
                self._step_all(runs, collected)
            return self._outputs(runs, collected)
        finally:
            self._release(runs)

    async def agenerate(self, requests: Sequence[GenerateRequest]) -> list[RequestOutput | PagedLLMError]:
        runs = self._start_all(requests)
        collected: dict[int, list[Chunk]] = {index: [] for index in range(len(runs))}
        try:
            while any(isinstance(run, _Run) and not run.ended for run in runs):
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
                self._running[request_id].aborted = True

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
        return self.stats()

    def match_prefix(self, request: GenerateRequest) -> int:
        self._check_usable()
        return self._match(request.hints.salt, self._encode(request))

    async def amatch_prefix(self, request: GenerateRequest) -> int:
        return self.match_prefix(request)

    def warm(self, request: GenerateRequest) -> RequestOutput:
        run = self._start(request)
        with self._lock:
            run.pieces, run.token_ids = [], ()
            run.finish_reason, run.stop_reason = "length", None
            return _assemble([self._step(run)])

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

    def _start_all(self, requests: Sequence[GenerateRequest]) -> list[_Run | PagedLLMError]:
        self._check_usable()
        self.batches.append(len(requests))
        return [self._try_start(request) for request in requests]

    def _try_start(self, request: GenerateRequest) -> _Run | PagedLLMError:
        try:
            return self._start(request)
        except PagedLLMError as error:
            return error

    def _start(self, request: GenerateRequest) -> _Run:
        self._check_usable()
        with self._lock:
            self.requests.append(request)
            prompt_ids = self._encode(request)
            self._check(request, prompt_ids)
            cached_tokens = self._match(request.hints.salt, prompt_ids)
            self._prefix_queries += len(prompt_ids)
            self._prefix_hits += cached_tokens
            text, token_ids, finish_reason, stop_reason = scripted_answer(
                request.sampling, prompt_ids, self._info.max_model_len
            )
            pieces = [text[at : at + self.chunk_size] for at in range(0, len(text), self.chunk_size)]
            run = _Run(request, prompt_ids, pieces, token_ids, finish_reason, stop_reason, cached_tokens)
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
        if any(token_id > EOS for token_id in (*prompt_ids, *request.sampling.stop_token_ids)):
            raise InvalidRequestError("a token id is outside the vocabulary", param="prompt")
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
        return tuple(self.tokenize("".join([*turns, "<assistant>"])))

    def _step_all(self, runs: Sequence[_Run | PagedLLMError], collected: dict[int, list[Chunk]]) -> None:
        for index, run in enumerate(runs):
            if isinstance(run, _Run) and not run.ended:
                collected[index].append(self._step(run))

    def _step(self, run: _Run) -> Chunk:
        """The next chunk; the one after the last piece of text carries the end."""
        self._check_usable()
        with self._lock:
            self._num_steps += 1
            now = time.perf_counter()
            run.first_token = run.first_token or now
            start = run.num_emitted * self.chunk_size
            if not run.aborted and run.num_emitted < len(run.pieces):
                piece = run.pieces[run.num_emitted]
                run.num_emitted += 1
                token_ids = run.token_ids[start : start + len(piece)]
                self._num_generated_tokens += len(token_ids)
                return Chunk(request_id=run.request.request_id, text=piece, token_ids=token_ids)
            token_ids = () if run.aborted else run.token_ids[sum(map(len, run.pieces)) :]
            num_tokens = start if run.aborted else len(run.token_ids)
            self._num_generated_tokens += len(token_ids)
            self._finish(run)
            return Chunk(
                request_id=run.request.request_id,
                text="",
                token_ids=token_ids,
                finish_reason="abort" if run.aborted else run.finish_reason,
                stop_reason=None if run.aborted else run.stop_reason,
                usage=Usage(
                    prompt_tokens=len(run.prompt_ids), completion_tokens=num_tokens, cached_tokens=run.cached_tokens
                ),
                timings=Timings(queue_s=0.0, ttft_s=run.first_token - run.arrived, total_s=now - run.arrived),
            )

    def _finish(self, run: _Run) -> None:
        run.num_emitted = len(run.pieces) + 1
        self._running.pop(run.request.request_id, None)
        self.num_aborts += run.aborted
        computed = run.prompt_ids if run.aborted else run.prompt_ids + run.token_ids[:-1]
        for end in range(self._info.block_size, len(computed) + 1, self._info.block_size):
            self._cached.add((run.request.hints.salt, computed[:end]))

    def _outputs(
        self, runs: Sequence[_Run | PagedLLMError], collected: dict[int, list[Chunk]]
    ) -> list[RequestOutput | PagedLLMError]:
        return [
            run if isinstance(run, PagedLLMError) else _assemble(collected[index]) for index, run in enumerate(runs)
        ]

    def _release(self, runs: Sequence[_Run | PagedLLMError]) -> None:
        """Abort what its consumer left before the end."""
        with self._lock:
            for run in runs:
                if isinstance(run, _Run) and not run.ended:
                    run.aborted = True
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


def _assemble(chunks: Sequence[Chunk]) -> RequestOutput:
    last = chunks[-1]
    assert last.finish_reason is not None
    assert last.usage is not None
    assert last.timings is not None
    choice = Choice(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
    return RequestOutput(request_id=last.request_id, choices=(choice,), usage=last.usage, timings=last.timings)
