"""The asynchronous side of a cluster's engine: calls to replicas, and what is learnt from them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError

from ..api import GenerateRequest
from ..errors import EngineClosedError, EngineDeadError, EngineError, InvalidRequestError, PagedLLMError
from ..streams import OutputStream
from .messages import Call, News, Reply, Target
from .routing import PrefixRouting

__all__ = ["OpenCall", "Replicas"]

logger = logging.getLogger(__name__)

# How often to look whether there are other replicas than before.
_WATCH_S = 0.2
_RETRY_S = 1.0


@dataclass(eq=False)
class OpenCall:
    """A request on its way.

    Args:
        stream: Where its chunks go.
        replica: Who answers it, once that is known.
        has_output: Whether anything of the answer has come.
        is_aborted: Whether somebody has asked for its end.
        is_dropped: Whether nobody reads the stream any more.
        task: What runs it.
    """

    call: Call
    stream: OutputStream = field(default_factory=OutputStream)
    replica: str | None = None
    has_output: bool = False
    is_aborted: bool = False
    is_dropped: bool = False
    task: asyncio.Task[None] | None = None


class _ReplicaLostError(Exception):
    """The replica died, or cannot be reached."""


class Replicas:
    """Speaks to the replicas of a deployment. Everything runs in one event loop.

    Args:
        handle: Of the deployment.
        routing: The accounts of the router in the handle.
        follows: Whether to keep up with what replicas hold; only a router that asks for it needs that.
    """

    def __init__(self, handle: Any, routing: PrefixRouting, *, follows: bool) -> None:
        self._handle = handle
        self._generating = handle.options(stream=True).generate
        self._routing = routing
        self._follows = follows
        self._open: dict[str, OpenCall] = {}
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._aborts: set[asyncio.Future[Any]] = set()

    @property
    def names(self) -> tuple[str, ...]:
        return self._routing.replicas

    async def run(self, opened: OpenCall) -> None:
        """Run a request to its end; nothing is raised, the stream gets what goes wrong.

        A request of which nothing has come when its replica dies is sent once more, to another one.
        """
        request_id = opened.call.request.request_id
        if request_id in self._open:
            opened.stream.fail(InvalidRequestError.for_value("request_id", request_id, "is already in flight"))
            return
        self._open[request_id] = opened
        opened.task = asyncio.current_task()
        try:
            if not opened.is_dropped:
                await self._run_with_retry(opened)
        except PagedLLMError as error:
            opened.stream.fail(error)
        except asyncio.CancelledError:
            opened.stream.fail(EngineClosedError("the request was given up"))
        except Exception as error:
            # The message may quote the request.
            logger.error("a request to a replica failed: %s", type(error).__name__)
            failure = EngineError(f"a request to a replica failed: {type(error).__name__}")
            failure.__cause__ = error
            opened.stream.fail(failure)
        finally:
            del self._open[request_id]
            self._routing.release(request_id)

    def abort(self, request_id: str) -> None:
        """End a request within a step of its engine; its stream gets a last chunk."""
        opened = self._open.get(request_id)
        if opened is not None and not opened.is_aborted:
            opened.is_aborted = True
            self._send_abort(opened)

    def drop(self, opened: OpenCall) -> None:
        """As ``abort``, of a request whose stream nobody reads any more."""
        opened.is_dropped = True
        if opened.replica is None and opened.task is not None:
            opened.task.cancel()
        elif opened.task is not None and not opened.is_aborted:
            opened.is_aborted = True
            self._send_abort(opened)

    async def describe(self) -> Any:
        """What one of the engines, which are all alike, runs; waits until there is one."""
        return await self._handle.describe.remote()

    async def ask_all(self, method: str, *args: Any) -> list[Any]:
        """The answers of all replicas; of those that die meanwhile there is none.

        Raises:
            EngineDeadError: There is no replica.
        """
        answers = await asyncio.gather(*(self._ask(method, name, *args) for name in self.names))
        answers = [answer for answer in answers if answer is not None]
        if not answers:
            raise EngineDeadError("there is no replica now")
        return answers

    async def match_prefix(self, request: GenerateRequest) -> int:
        """How many tokens of the request's prompt the replica that has most of it holds."""
        return max(await self.ask_all("match_prefix", request))

    async def watch(self) -> None:
        """Follow each replica, for ever."""
        while self._follows:
            names = set(self.names)
            for name in [name for name in self._followers if name not in names]:
                self._followers.pop(name).cancel()
            for name in names:
                if name not in self._followers or self._followers[name].done():
                    self._followers[name] = asyncio.ensure_future(self._follow(name))
            await asyncio.sleep(_WATCH_S)

    async def _run_with_retry(self, opened: OpenCall) -> None:
        try:
            await self._run_once(opened, opened.call)
        except _ReplicaLostError as error:
            dead = EngineDeadError("the replica that computed the answer has died")
            dead.__cause__ = error.__cause__
            if opened.has_output or opened.is_aborted:
                raise dead from error.__cause__
            lost = frozenset() if opened.replica is None else frozenset({opened.replica})
            opened.replica = None
            again = dataclasses.replace(opened.call, query=dataclasses.replace(opened.call.query, excluded=lost))
            try:
                await self._run_once(opened, again)
            except _ReplicaLostError:
                raise dead from error.__cause__

    async def _run_once(self, opened: OpenCall, call: Call) -> None:
        replies = self._generating.remote(call)
        try:
            async for reply in replies:
                self._take(opened, reply)
        except RayActorError as error:
            if opened.replica is not None:
                self._routing.forget(opened.replica)
            raise _ReplicaLostError from error
        except asyncio.CancelledError:
            replies.cancel()
            raise

    def _take(self, opened: OpenCall, reply: Reply) -> None:
        if reply.error is not None:
            raise reply.error
        if opened.replica is None:
            opened.replica = reply.replica
            if opened.is_aborted:
                self._send_abort(opened)
        query, told = opened.call.query, reply.acknowledgement
        if told is not None:
            held = query.chain[: told.num_held]
            self._routing.acknowledge(reply.replica, held=held, as_of=told.as_of, load=told.load)
            self._routing.prefilled(query.request_id)
        for chunk in reply.chunks:
            opened.has_output = True
            opened.stream.put(chunk)

    def _send_abort(self, opened: OpenCall) -> None:
        if opened.replica is not None:  # else when it is known
            abort = asyncio.ensure_future(self._ask("abort", opened.replica, opened.call.request.request_id))
            self._aborts.add(abort)  # or the task might be collected
            abort.add_done_callback(self._aborts.discard)

    async def _ask(self, method: str, name: str, *args: Any) -> Any:
        """A replica's answer; None if it is there no more."""
        with contextlib.suppress(RayActorError):
            return await getattr(self._handle, method).remote(Target(replica=name), *args)
        self._routing.forget(name)
        return None

    async def _follow(self, name: str) -> None:
        """Keep up with what a replica holds until it is gone."""
        number: int | None = None
        while name in self._routing.replicas:
            try:
                news: News | None = await self._ask("follow", name, number)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                logger.warning("cannot follow a replica: %s", type(error).__name__)
                await asyncio.sleep(_RETRY_S)
                continue
            if news is None:
                await asyncio.sleep(_WATCH_S)
                continue
            update = news.update
            self._routing.update(
                name,
                as_of=update.as_of,
                stored=update.stored,
                removed=update.removed,
                is_snapshot=update.is_snapshot,
                load=news.load,
            )
            number = update.as_of
