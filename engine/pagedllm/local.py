"""The engine in this process."""

from __future__ import annotations

import asyncio
import functools
import os
import weakref
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import TypeVar

from .api import (
    EngineStats,
    GenerateRequest,
    Health,
    ModelInfo,
    RequestOutput,
)
from .assemble import output_or_raise
from .compute.model_runner import ModelRunner
from .compute.sampler import Sampler
from .config import EngineConfig
from .control.kv_cache_manager import KVCacheManager
from .control.kv_events import KVEventListener
from .control.policies import POLICIES
from .control.scheduler import Scheduler
from .control.sequence import Sequence
from .control.step_cost import StepCost
from .control.swap_choice import SwapChoice
from .core import EngineCore, StepRecord
from .errors import EngineError, ForkedProcessError, PagedLLMError
from .files.description import read_generation_defaults
from .files.locate import ModelFiles, locate_model
from .intake import Intake, as_warming
from .streams import AsyncChunks, Chunks, LateAsyncChunks, OutputStream, acollect_output, collect_output
from .text.answer import AnswerForms
from .text.tokenizer import Tokenizer, load_tokenizer
from .worker import Worker

__all__ = ["LocalEngine"]

_Stream = TypeVar("_Stream")


class LocalEngine:
    """Runs a model in this process; obeys the Engine protocol.

    Loading happens here and takes seconds. One worker thread owns the model; every method may be called from any
    thread and any event loop. ``close()``, the end of a ``with`` block, garbage collection and interpreter exit all
    stop the worker and free the memory.

    Args:
        config: What to run and how.
        on_step: Told about every step, in the worker thread; for benchmarks.

    Raises:
        ModelLoadError: The model cannot be found, read or run.
        ConfigError: The configuration does not fit the model or the machine.
    """

    def __init__(self, config: EngineConfig, *, on_step: Callable[[StepRecord], None] | None = None) -> None:
        self.config = config
        self._pid = os.getpid()
        files = locate_model(config.model)
        # Read before the weights: a model that we refuse should be refused at once.
        self._tokenizer = load_tokenizer(
            files, chat_template=config.chat_template, template_variables=dict(config.chat_template_kwargs)
        )
        defaults = read_generation_defaults(files)
        self._worker = Worker(
            functools.partial(_build_core, config, files, self._tokenizer, on_step),
            queue_timeout_s=config.queue_timeout_s,
        )
        self._info = self._worker.call(functools.partial(_describe, config)).result()
        forms = AnswerForms(self._tokenizer, self._info.vocab_size, config)
        self._intake = Intake(self._tokenizer, self._info, defaults, forms)
        # Also runs at interpreter exit. It must not refer to self, or self would never be collected.
        self._stop_worker = weakref.finalize(self, _stop_in_same_process, self._worker, self._pid)

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def generate(self, requests: List[GenerateRequest]) -> list[RequestOutput | PagedLLMError]:
        """Run all requests together; each item of the answer is an output or the error of that request alone."""
        streams = self._start_together(Chunks, [self._try_make_sequences(request) for request in requests])
        try:
            return [stream if isinstance(stream, PagedLLMError) else collect_output(stream) for stream in streams]
        finally:
            for stream in streams:
                if isinstance(stream, Chunks):
                    stream.close()

    async def agenerate(self, requests: List[GenerateRequest]) -> list[RequestOutput | PagedLLMError]:
        """As ``generate``, without blocking the event loop; cancelling it aborts all requests."""
        made = [
            await asyncio.to_thread(self._try_make_sequences, request)
            if self._intake.may_wait(request)
            else self._try_make_sequences(request)
            for request in requests
        ]
        streams = self._start_together(AsyncChunks, made)
        try:
            return [
                stream if isinstance(stream, PagedLLMError) else await acollect_output(stream) for stream in streams
            ]
        finally:
            for stream in streams:
                if isinstance(stream, AsyncChunks):
                    await stream.aclose()

    def stream(self, request: GenerateRequest) -> Chunks:
        """Start a request and iterate over its chunks; closing or dropping the iterator aborts it.

        Raises:
            PagedLLMError: The request is wrong (now) or fails (while iterating).
        """
        (stream,) = self._worker.submit([self._make_sequences(request)])
        return Chunks(stream, self._aborter(request.request_id))

    def astream(self, request: GenerateRequest, *, token_ids: List[int] | None = None) -> AsyncChunks | LateAsyncChunks:
        """As ``stream``, for an event loop. A request whose grammar is to be compiled begins with the first chunk.

        Args:
            token_ids: The request's prompt, if somebody has encoded it already with the same tokenizer.
        """
        self._check_usable()
        if self._intake.may_wait(request):
            return LateAsyncChunks(functools.partial(self._start_late, request, token_ids))
        (stream,) = self._worker.submit([self._make_sequences(request, token_ids)])
        return AsyncChunks(stream, self._aborter(request.request_id))

    def abort(self, request_id: str) -> None:
        """End a request within a step; its stream gets a last chunk with finish reason ``abort``."""
        self._check_usable()
        self._worker.abort(request_id)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: List[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def count_tokens(self, request: GenerateRequest) -> int:
        """Tokens of the request's prompt, or of its chat as the template renders it."""
        return len(self._intake.encode_prompt(request))

    def model_info(self) -> ModelInfo:
        return self._info

    def health(self) -> Health:
        failure = self._worker.failure
        return Health(ok=True) if failure is None else Health(ok=False, reason=str(failure))

    @property
    def is_idle(self) -> bool:
        """Whether no request is queued or running; may change at any moment."""
        return self._worker.is_idle

    def stats(self) -> EngineStats:
        self._check_usable()
        return self._worker.call(EngineCore.stats).result()

    async def astats(self) -> EngineStats:
        self._check_usable()
        return await asyncio.wrap_future(self._worker.call(EngineCore.stats))

    def match_prefix(self, request: GenerateRequest) -> int:
        """How many tokens of the request's prompt are cached now. Changes nothing."""
        self._check_usable()
        return self._worker.call(self._prefix_matcher(request)).result()

    async def amatch_prefix(self, request: GenerateRequest) -> int:
        self._check_usable()
        return await asyncio.wrap_future(self._worker.call(self._prefix_matcher(request)))

    def warm(self, request: GenerateRequest) -> RequestOutput:
        """Compute and cache the request's prompt and generate nothing."""
        (output,) = self.generate([as_warming(request)])
        return output_or_raise(output)

    async def awarm(self, request: GenerateRequest) -> RequestOutput:
        (output,) = await self.agenerate([as_warming(request)])
        return output_or_raise(output)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests go on and share nothing new."""
        self._check_usable()
        self._worker.call(_reset_prefix_cache).result()

    async def areset_prefix_cache(self) -> None:
        self._check_usable()
        await asyncio.wrap_future(self._worker.call(_reset_prefix_cache))

    def listen_to_kv_events(self, listener: KVEventListener) -> None:
        """Tell ``listener`` of all blocks in the prefix cache, and from now on of those that come and go.

        Args:
            listener: Called by the engine's thread at each change; it must be quick. There is one: the last.
        """
        self._check_usable()
        self._worker.call(functools.partial(_listen, listener)).result()

    def close(self) -> None:
        """Stop the worker and free model and cache; what is in flight fails with EngineClosedError."""
        self._stop_worker()

    async def aclose(self) -> None:
        await asyncio.to_thread(self.close)

    async def _start_late(self, request: GenerateRequest, token_ids: List[int] | None) -> AsyncChunks:
        sequences = await asyncio.to_thread(self._make_sequences, request, token_ids)
        (stream,) = self._worker.submit([sequences])
        return AsyncChunks(stream, self._aborter(request.request_id))

    def _start_together(
        self,
        kind: Callable[[OutputStream, Callable[[], None]], _Stream],
        made: List[list[Sequence] | PagedLLMError],
    ) -> list[_Stream | PagedLLMError]:
        """Submit all requests at once; in place of each that is wrong stands its error."""
        started = iter(self._worker.submit([item for item in made if not isinstance(item, PagedLLMError)]))
        return [
            item if isinstance(item, PagedLLMError) else kind(next(started), self._aborter(item[0].request_id))
            for item in made
        ]

    def _try_make_sequences(self, request: GenerateRequest) -> list[Sequence] | PagedLLMError:
        try:
            return self._make_sequences(request)
        except EngineError:
            raise  # concerns all requests
        except PagedLLMError as error:
            return error

    def _make_sequences(self, request: GenerateRequest, token_ids: List[int] | None = None) -> list[Sequence]:
        self._check_usable()
        return self._intake.make_sequences(request, token_ids)

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcessError(
                "this engine belongs to the process that loaded it and does not survive fork(); "
                "load one in the child, or start workers with the 'spawn' method"
            )

    def _aborter(self, request_id: str) -> Callable[[], None]:
        """What an iterator calls to give up. As a bound method it also keeps the engine alive for the iterator."""
        return functools.partial(self._abort_if_here, request_id)

    def _abort_if_here(self, request_id: str) -> None:
        if os.getpid() == self._pid:
            self._worker.abort(request_id)

    def _prefix_matcher(self, request: GenerateRequest) -> Callable[[EngineCore], int]:
        token_ids = self._intake.encode_prompt(request)

        def match(core: EngineCore) -> int:
            manager = core.scheduler.kv_cache_manager
            return len(manager.match_prefix(token_ids, request.hints.salt)) * manager.block_size

        return match


def _build_core(
    config: EngineConfig,
    files: ModelFiles,
    tokenizer: Tokenizer,
    on_step: Callable[[StepRecord], None] | None,
) -> EngineCore:
    runner = ModelRunner(config, files)
    manager = KVCacheManager(
        num_blocks=runner.pool_size.num_blocks,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        num_host_blocks=runner.num_host_blocks,
        max_pinned_fraction=config.max_pinned_fraction,
    )
    swap_choice = SwapChoice(
        mode=config.preemption_mode,
        bytes_per_block=runner.bytes_per_token * config.block_size,
        copy_bytes_per_s=runner.copy_bytes_per_s,
    )
    scheduler = Scheduler(
        manager,
        max_num_seqs=runner.limits.max_num_seqs,
        max_num_batched_tokens=runner.limits.max_num_batched_tokens,
        policy=POLICIES[config.scheduling_policy],
        max_num_queued_requests=config.max_num_queued_reqs,
        swap_choice=swap_choice,
        step_cost=StepCost(max_stretch=config.max_itl_stretch, long_prompt=config.long_prefill_token_threshold),
    )
    return EngineCore(scheduler, runner, Sampler(runner.kernels), tokenizer, on_step)


def _describe(config: EngineConfig, core: EngineCore) -> ModelInfo:
    runner, tokenizer = core.model_runner, core.tokenizer
    return ModelInfo(
        model=config.model,
        architecture=runner.model_config.architecture,
        dtype=str(runner.dtype).removeprefix("torch."),
        kernels=runner.kernels.name,
        vocab_size=runner.model_config.vocab_size,
        max_model_len=runner.pool_size.max_model_len,
        eos_token_ids=tuple(sorted(tokenizer.eos_token_ids)),
        has_chat_template=tokenizer.chat_template is not None,
        block_size=config.block_size,
        num_blocks=runner.pool_size.num_blocks,
        kv_bytes_per_token=runner.bytes_per_token,
        max_num_seqs=runner.limits.max_num_seqs,
    )


def _reset_prefix_cache(core: EngineCore) -> None:
    core.scheduler.kv_cache_manager.reset_prefix_cache(core.scheduler.running)


def _listen(listener: KVEventListener, core: EngineCore) -> None:
    core.scheduler.kv_cache_manager.prefix_cache.listen(listener)


def _stop_in_same_process(worker: Worker, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has no such thread to wait for
        worker.stop()
