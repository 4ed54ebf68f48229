"""Many engines as one: the Engine protocol over the replicas of a deployment."""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..api import EngineStats, GenerateRequest, Health, ModelInfo, RequestOutput
from ..assemble import output_or_raise
from ..config import EngineConfig
from ..errors import EngineClosedError, EngineError, PagedLLMError
from ..intake import as_warming
from ..streams import AsyncChunks, Chunks, OutputStream, acollect_output, collect_output
from .loop_thread import LoopThread
from .prompts import Prompts
from .replicas import OpenCall, Replicas
from .shared import shared_routing
from .statistics import combine_stats

__all__ = ["ClusterEngine"]

_Stream = TypeVar("_Stream")


class ClusterEngine:
    """Obeys the Engine protocol; any number of them may speak to the same replicas.

    Prompts are encoded here, in the calling thread.

    Args:
        handle: Ray Serve's, of a deployment of ``EngineDeployment``.
        config: The engines'.
        follows: Whether the deployment's router goes by what replicas hold.

    Raises:
        ModelLoadError: The model's files are not on this machine.
    """

    def __init__(self, handle: Any, config: EngineConfig, *, follows: bool = True) -> None:
        routing = shared_routing(handle.app_name, handle.deployment_name)
        self._replicas = Replicas(handle, routing, follows=follows)
        self._thread = LoopThread("pagedllm-cluster")
        # Also at interpreter exit. It must not refer to self, or self would never be collected.
        self._stop = weakref.finalize(self, self._thread.close)
        self._info: ModelInfo = self._thread.submit(self._replicas.describe()).result()
        self._prompts = Prompts(config, self._info)
        self._thread.submit(self._replicas.watch())

    def __enter__(self) -> ClusterEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def generate(self, requests: Sequence[GenerateRequest]) -> list[RequestOutput | PagedLLMError]:
        """Run all requests; each item of the answer is an output or the error of that request alone."""
        streams = self._start_together(Chunks, requests)
        try:
            return [stream if isinstance(stream, PagedLLMError) else collect_output(stream) for stream in streams]
        finally:
            for stream in streams:
                if isinstance(stream, Chunks):
                    stream.close()

    async def agenerate(self, requests: Sequence[GenerateRequest]) -> list[RequestOutput | PagedLLMError]:
        """As ``generate``, without blocking the event loop; cancelling it aborts all requests."""
        streams = self._start_together(AsyncChunks, requests)
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
            PagedLLMError: The request is wrong (now, or while iterating), or fails (while iterating).
        """
        return self._start(Chunks, request)

    def astream(self, request: GenerateRequest) -> AsyncChunks:
        """As ``stream``, for an event loop."""
        return self._start(AsyncChunks, request)

    def abort(self, request_id: str) -> None:
        """End a request within a step; its stream gets a last chunk with finish reason ``abort``."""
        self._check_usable()
        self._thread.post(functools.partial(self._replicas.abort, request_id))

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._prompts.tokenize(text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return self._prompts.detokenize(token_ids)

    def count_tokens(self, request: GenerateRequest) -> int:
        """Tokens of the request's prompt, or of its chat as the template renders it."""
        return len(self._prompts.encode(request))

    def model_info(self) -> ModelInfo:
        """Of each engine; the pool's size is that of one."""
        return self._info

    def health(self) -> Health:
        """Whether there is a replica."""
        if not self._stop.alive:
            return Health(ok=False, reason="the engine was closed")
        return Health(ok=True) if self._replicas.names else Health(ok=False, reason="there is no replica now")

    @property
    def replica_names(self) -> tuple[str, ...]:
        """The replicas that are there now."""
        return self._replicas.names

    def stats(self) -> EngineStats:
        """Sums over the replicas that are there now; counters begin anew with a replica that replaces another."""
        return combine_stats(self._thread.submit(self._replicas.ask_all("stats")).result())

    async def astats(self) -> EngineStats:
        return combine_stats(await asyncio.wrap_future(self._thread.submit(self._replicas.ask_all("stats"))))

    async def aeach_stats(self) -> list[EngineStats]:
        """The figures of each replica, in the order of ``replica_names``."""
        return await asyncio.wrap_future(self._thread.submit(self._replicas.ask_all("stats")))

    def match_prefix(self, request: GenerateRequest) -> int:
        """How many tokens of the request's prompt are cached where most of it is. Changes nothing."""
        return self._thread.submit(self._replicas.match_prefix(request)).result()

    async def amatch_prefix(self, request: GenerateRequest) -> int:
        return await asyncio.wrap_future(self._thread.submit(self._replicas.match_prefix(request)))

    def warm(self, request: GenerateRequest) -> RequestOutput:
        """Compute and cache the request's prompt at the replica that gets it, and generate nothing."""
        (output,) = self.generate([as_warming(request)])
        return output_or_raise(output)

    async def awarm(self, request: GenerateRequest) -> RequestOutput:
        (output,) = await self.agenerate([as_warming(request)])
        return output_or_raise(output)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, at every replica."""
        self._thread.submit(self._replicas.ask_all("reset_prefix_cache")).result()

    async def areset_prefix_cache(self) -> None:
        await asyncio.wrap_future(self._thread.submit(self._replicas.ask_all("reset_prefix_cache")))

    def close(self) -> None:
        """End what was asked through this object; the replicas go on."""
        self._stop()

    async def aclose(self) -> None:
        await asyncio.to_thread(self.close)

    def _start(self, kind: Callable[[OutputStream, Callable[[], None]], _Stream], request: GenerateRequest) -> _Stream:
        self._check_usable()
        opened = OpenCall(self._prompts.make_call(request))
        self._thread.submit(self._replicas.run(opened))
        return kind(opened.stream, functools.partial(_drop, self._thread, self._replicas, opened))

    def _start_together(
        self, kind: Callable[[OutputStream, Callable[[], None]], _Stream], requests: Sequence[GenerateRequest]
    ) -> list[_Stream | PagedLLMError]:
        """Start all requests; in place of each that is wrong stands its error."""
        streams: list[_Stream | PagedLLMError] = []
        for request in requests:
            try:
                streams.append(self._start(kind, request))
            except EngineError:
                raise  # concerns all requests
            except PagedLLMError as error:
                streams.append(error)
        return streams

    def _check_usable(self) -> None:
        if not self._stop.alive:
            raise EngineClosedError("the engine was closed")


def _drop(thread: LoopThread, replicas: Replicas, opened: OpenCall) -> None:
    thread.post(functools.partial(replicas.drop, opened))
