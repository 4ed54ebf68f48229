"""One engine as a deployment of Ray Serve: what a replica does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from ray import serve

from ..api import Chunk, EngineStats, GenerateRequest, ModelInfo
from ..config import EngineConfig
from ..errors import PagedLLMError
from ..registry import load_engine
from .autoscaling import KV_PRESSURE, QUEUE_PRESSURE
from .config import ClusterConfig
from .kv_log import KVLog
from .messages import Acknowledgement, Call, News, Reply, Target
from .routing import ReplicaLoad

__all__ = ["EngineDeployment"]

# How long a follower's question waits for news. A replica that is to stop waits for it, so it is short.
_FOLLOW_S = 2.0
# News are gathered for so long before they are sent.
_GATHER_S = 0.02


class EngineDeployment:
    """Runs one engine; a deployment makes replicas of it.

    Methods whose first argument is a ``Target`` are for that replica, and give None where they come to another one.

    Args:
        config: Of the engine.
        cluster_config: Whose targets the autoscaling figures are shares of.
    """

    def __init__(self, config: EngineConfig, cluster_config: ClusterConfig) -> None:
        self._name = serve.get_replica_context().replica_id.unique_id
        self._cluster_config = cluster_config
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._waiting: dict[str, int] = {}
        self._open: dict[str, int] = {}
        self._log = KVLog(on_change=self._wake)
        self._engine = load_engine(config)
        self._engine.listen_to_kv_events(self._log.record)

    async def describe(self) -> ModelInfo:
        """What the engine runs."""
        return self._engine.model_info()

    async def generate(self, call: Call) -> AsyncIterator[Reply]:
        """Run a request; its chunks, with what the router has to know at its first and last one."""
        request, query = call.request, call.query
        num_held, _ = self._log.num_held(query.chain)
        self._waiting[request.request_id] = query.num_tokens - num_held * query.block_size
        self._open[request.request_id] = query.num_tokens
        yield Reply(replica=self._name)
        try:
            stream = self._engine.astream(request, token_ids=call.token_ids)
            async with contextlib.aclosing(stream):
                is_first = True
                async for chunk in stream:
                    self._waiting.pop(request.request_id, None)
                    acknowledgement = self._acknowledge(call) if is_first or chunk.usage is not None else None
                    is_first = False
                    yield self._reply(chunk, acknowledgement)
        except PagedLLMError as error:
            yield Reply(replica=self._name, error=error)
        finally:
            self._waiting.pop(request.request_id, None)
            self._open.pop(request.request_id, None)

    async def abort(self, target: Target, request_id: str) -> None:
        """End a request within a step."""
        if target.replica == self._name:
            with contextlib.suppress(PagedLLMError):  # a dead engine has ended it already
                self._engine.abort(request_id)

    async def stats(self, target: Target) -> EngineStats | None:
        return await self._engine.astats() if target.replica == self._name else None

    async def match_prefix(self, target: Target, request: GenerateRequest) -> int | None:
        return await self._engine.amatch_prefix(request) if target.replica == self._name else None

    async def reset_prefix_cache(self, target: Target) -> bool | None:
        if target.replica != self._name:
            return None
        await self._engine.areset_prefix_cache()
        return True

    async def follow(self, target: Target, number: int | None) -> News | None:
        """What has changed in the prefix cache since a number; waits a while for something to change.

        Args:
            number: Up to which change the follower knows; None if it knows nothing.
        """
        if target.replica != self._name:
            return None
        self._loop = asyncio.get_running_loop()
        self._changed.clear()  # before looking, so that no change falls between
        if number == self._log.as_of:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _FOLLOW_S)
            await asyncio.sleep(_GATHER_S)
        return News(update=self._log.since(number), load=self._load())

    async def check_health(self) -> None:
        """Ray replaces a replica whose engine is dead, or so stuck that this does not return in time.

        Raises:
            RuntimeError: It is dead.
        """
        health = self._engine.health()
        if not health.ok:
            raise RuntimeError(health.reason)
        await self._engine.astats()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """How busy it is, as shares of the targets."""
        stats, config = await self._engine.astats(), self._cluster_config
        return {
            QUEUE_PRESSURE: self._load().num_queued_tokens / config.target_queued_tokens,
            KV_PRESSURE: stats.kv_cache_usage / config.target_kv_usage,
        }

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.close()

    def _reply(self, chunk: Chunk, acknowledgement: Acknowledgement | None) -> Reply:
        return Reply(replica=self._name, chunks=(chunk,), acknowledgement=acknowledgement)

    def _acknowledge(self, call: Call) -> Acknowledgement:
        num_held, as_of = self._log.num_held(call.query.chain)
        return Acknowledgement(num_held=num_held, as_of=as_of, load=self._load())

    def _load(self) -> ReplicaLoad:
        return ReplicaLoad(num_queued_tokens=sum(self._waiting.values()), num_running_tokens=sum(self._open.values()))

    def _wake(self) -> None:
        """Tell those who follow; called by the engine's thread."""
        loop: Any = self._loop
        if loop is not None and not self._changed.is_set():
            with contextlib.suppress(RuntimeError):  # the loop is closed: the replica ends
                loop.call_soon_threadsafe(self._changed.set)
