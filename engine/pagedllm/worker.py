"""The thread that owns scheduler, cache and device. Everyone else leaves a message and waits on a stream of its own."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, TypeVar

from .api import Chunk
from .control.sequence import Sequence
from .core import EngineCore
from .errors import (
    EngineClosedError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    PagedLLMError,
    QueueTimeoutError,
)
from .streams import OutputStream

__all__ = ["Worker"]

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class _Submit:
    """Requests that arrive together, each with the sequences of its choices, so that one step can admit them all."""

    requests: list[list[Sequence]]
    streams: list[OutputStream]


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[EngineCore], Any]
    future: Future[Any]


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Message = _Submit | _Abort | _Call | _Stop


class Worker:
    """Builds and runs an EngineCore in a thread of its own.

    The core is built there too, because OpenMP keeps a pool of threads for each thread that computes: a pool left by
    loading in the caller's thread would make libgomp think that the CPUs are overcommitted, and let the pool that
    decodes sleep between any two operations (measured: half the speed at batch 1).

    Nobody waits for ever: when the thread ends, for whatever reason, it first records why in ``failure`` and then
    fails every stream and call that it knows. A message that arrives later finds ``failure`` set, because its sender
    looks after leaving it.
    """

    def __init__(self, build: Callable[[], EngineCore], *, queue_timeout_s: float | None = None) -> None:
        """Wait until the core is built; raises what ``build`` raises."""
        self._queue_timeout_s = queue_timeout_s
        self.failure: EngineError | None = None
        # SimpleQueue.put is reentrant, so that the garbage collector may call abort() at any moment.
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._streams: dict[str, OutputStream] = {}
        self._core: EngineCore | None = None
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(build, started), name="pagedllm-worker", daemon=True)
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self._inbox.put(_Stop())  # an interrupted caller leaves a thread that is still loading
            raise

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or running; may change at any moment."""
        return not self._streams and self._inbox.empty()

    def submit(self, requests: list[list[Sequence]]) -> list[OutputStream]:
        """Queue requests, each as the sequences of its choices.

        Returns:
            A stream for each: through it come its chunks, or the reason why it cannot run.
        """
        streams = [OutputStream() for _ in requests]
        self._inbox.put(_Submit(requests, streams))
        if self.failure is not None:
            for stream in streams:
                stream.fail(self._explain())
        return streams

    def abort(self, request_id: str) -> None:
        """End a request within a step; unknown and finished ones are ignored."""
        self._inbox.put(_Abort(request_id))

    def call(self, function: Callable[[EngineCore], _Result]) -> Future[_Result]:
        """Run a function on the core between two steps."""
        future: Future[_Result] = Future()
        self._inbox.put(_Call(function, future))
        if self.failure is not None:
            _fail(future, self._explain())
        return future

    def stop(self) -> None:
        """End the thread and wait for it. What is in flight fails with EngineClosedError."""
        self._inbox.put(_Stop())
        if threading.current_thread() is not self._thread:  # the garbage collector may call from anywhere
            self._thread.join()

    def _run(self, build: Callable[[], EngineCore], started: Future[None]) -> None:
        try:
            core = self._core = build()
        except BaseException as error:
            self.failure = EngineClosedError("the engine was not loaded")
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            while self._handle_messages(core):
                self._expire_queue(core)
                chunks = core.step() if core.has_work else []
                for request_id, reason in core.take_failures().items():
                    self._streams.pop(request_id).fail(reason)
                for chunk in chunks:
                    self._deliver(chunk)
            self.failure = EngineClosedError("the engine was closed")
        except BaseException as error:
            logger.exception("the engine's worker died")
            self.failure = EngineDeadError(f"the engine's worker died: {error!r}")
            self.failure.__cause__ = error
        finally:
            del core  # with it go weights and KV cache
            self._core = None
            self._fail_everything()

    def _handle_messages(self, core: EngineCore) -> bool:
        """Take all messages, waiting for one only when there is no work; False to stop."""
        while True:
            try:
                message = self._inbox.get(block=not core.has_work)
            except queue.Empty:
                return True
            if isinstance(message, _Stop):
                return False
            self._handle(core, message)

    def _handle(self, core: EngineCore, message: _Message) -> None:
        if isinstance(message, _Submit):
            for sequences, stream in zip(message.requests, message.streams, strict=True):
                self._add(core, sequences, stream)
        elif isinstance(message, _Abort):
            for chunk in core.abort(message.request_id):
                self._deliver(chunk)
        elif isinstance(message, _Call):
            try:
                message.future.set_result(message.function(core))
            except Exception as error:
                _fail(message.future, error)

    def _add(self, core: EngineCore, sequences: list[Sequence], stream: OutputStream) -> None:
        request_id = sequences[0].request_id
        try:
            if request_id in self._streams:
                raise InvalidRequestError.for_value("request_id", request_id, "is already in flight")
            core.add(sequences)
        except PagedLLMError as error:
            stream.fail(error)
        else:
            self._streams[request_id] = stream

    def _expire_queue(self, core: EngineCore) -> None:
        timeout_s = self._queue_timeout_s
        if timeout_s is None:
            return
        for request_id in core.expire_queue(timeout_s):
            reason = f"the request waited longer than queue_timeout_s={timeout_s:g} without being computed"
            self._streams.pop(request_id).fail(QueueTimeoutError(f"{reason}; try again later"))

    def _deliver(self, chunk: Chunk) -> None:
        stream = self._streams.get(chunk.request_id)
        if stream is None:
            return  # has just failed
        if chunk.usage is not None:  # the request's last chunk
            del self._streams[chunk.request_id]
        stream.put(chunk)

    def _fail_everything(self) -> None:
        for stream in self._streams.values():
            stream.fail(self._explain())
        self._streams.clear()
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, _Submit):
                for stream in message.streams:
                    stream.fail(self._explain())
            elif isinstance(message, _Call):
                _fail(message.future, self._explain())

    def _explain(self) -> EngineError:
        """A fresh error for each waiter: raising one object in several threads would mix their tracebacks."""
        assert self.failure is not None
        error = type(self.failure)(str(self.failure))
        error.__cause__ = self.failure.__cause__
        return error


def _fail(future: Future[Any], error: BaseException) -> None:
    with contextlib.suppress(InvalidStateError):  # worker and sender may both notice the end
        future.set_exception(error)
