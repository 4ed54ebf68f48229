"""Ending what models compute for a block of code, wherever in a chain they stand."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

from pagedllm.api import Engine, GenerateRequest

from .deadline import ABORT_INTERVAL_S, ABORT_TRIES, abort_all
from .errors import RequestCancelledError

__all__ = ["CancelScope", "cancel_scope", "cancellable"]


class CancelScope:
    """What models compute inside a block; may be cancelled from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: list[tuple[Engine, Sequence[GenerateRequest]]] = []
        self._is_cancelled = False

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    def cancel(self) -> None:
        """Abort all requests of the scope at once; who waits for them gets what there is, with ``"abort"``.

        Calls that begin later are refused with ``RequestCancelledError``, so that no step of a chain goes on.
        """
        with self._changed:
            self._is_cancelled = True
            running = list(self._running)
        for engine, requests in running:
            abort_all(engine, requests)
        if running:
            threading.Thread(target=self._abort_again, name="pagedllm-cancel", daemon=True).start()

    def _abort_again(self) -> None:
        """The first abort may have come before the engine had seen the request."""
        for _ in range(ABORT_TRIES):
            with self._changed:
                if self._changed.wait_for(lambda: not self._running, ABORT_INTERVAL_S):
                    return
                running = list(self._running)
            for engine, requests in running:
                abort_all(engine, requests)

    @contextmanager
    def _running_in(self, engine: Engine, requests: Sequence[GenerateRequest]) -> Iterator[None]:
        item = (engine, requests)
        with self._changed:
            if self._is_cancelled:
                raise RequestCancelledError("the cancel_scope around this call was cancelled or left")
            self._running.append(item)
        try:
            yield
        finally:
            with self._changed:
                self._running.remove(item)
                self._changed.notify_all()


# Chains hand a caller's context on to their steps, and to the threads and tasks that these run in.
_SCOPES: ContextVar[tuple[CancelScope, ...]] = ContextVar("pagedllm_cancel_scopes", default=())


@contextmanager
def cancel_scope() -> Iterator[CancelScope]:
    """Let a block of code end what models compute inside it: by ``scope.cancel()``, or by being left.

    .. code-block:: python

        with cancel_scope() as scope:
            for piece in chain.stream(question):
                if is_enough(piece):
                    scope.cancel()
                    break

    A plain ``break`` is enough for a model's own ``stream`` and for every ``astream``. Of a sync chain that ends in a
    parser, LangChain reads the whole rest of the answer when it is left; ``scope.cancel()`` ends that too.
    """
    scope = CancelScope()
    token = _SCOPES.set((*_SCOPES.get(), scope))
    try:
        yield scope
    finally:
        _SCOPES.reset(token)
        scope.cancel()


@contextmanager
def cancellable(engine: Engine, requests: Sequence[GenerateRequest]) -> Iterator[None]:
    """Put requests under the scopes around the calling code, while the block runs.

    Raises:
        RequestCancelledError: One of the scopes was cancelled before.
    """
    with ExitStack() as stack:
        for scope in _SCOPES.get():
            stack.enter_context(scope._running_in(engine, requests))
        yield
