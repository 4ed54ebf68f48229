"""An engine behind a URL."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import threading
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from typing import Any

import httpx_sse

from .. import wire
from ..api import Chunk, EngineStats, GenerateRequest, Health, ModelInfo, RequestOutput
from ..errors import EngineClosedError, EngineError, ModelNotFoundError, PagedLLMError
from .async_http import AsyncHTTP
from .calls import Aborted, Call, Calls
from .chunk_stream import AsyncChunkReader, Mailbox
from .config import RemoteConfig
from .http_errors import decode_json
from .progress import Progress, aborted_output, with_timings
from .requests import Outgoing
from .sync_http import SyncHTTP

__all__ = ["RemoteEngine"]


class RemoteEngine:
    """Talks to a server of OpenAI's API; obeys the Engine protocol. Needs no torch.

    With our server answers are exactly the engine's there. With another one, such as vLLM's, what it does not tell is
    missing: token ids, cached tokens, or the endpoints of tokens and cache, whose methods then raise ``EngineError``.

    A request ends on the server when its connection closes: by closing or dropping its stream, by ``abort``,
    cancellation or Ctrl-C. What an aborted request had computed is not known here: ``generate`` then gives no text,
    and a stream's last chunk counts the tokens that arrived.

    Nothing is opened here. All methods are safe from any thread and event loop; those of an event loop share a client
    that ends with it.

    Args:
        config: Where the server is and how patiently to talk to it.
    """

    def __init__(self, config: RemoteConfig) -> None:
        self.config = config
        self._calls = Calls()
        self._sync = SyncHTTP(config)
        self._async = AsyncHTTP(config)
        self.is_closed = False
        self._model: ModelInfo | None = None
        # Must not refer to self, or self would never be collected.
        self._close_idle = weakref.finalize(self, self._sync.close)
        # The system closes what is open when the process ends.
        self._close_idle.atexit = False

    def __enter__(self) -> RemoteEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- Generation ---

    def generate(self, requests: Sequence[GenerateRequest]) -> list[RequestOutput | PagedLLMError]:
        """Run all requests at once, up to ``max_connections``; each item of the answer is an output or its error."""
        self._check_open()
        if len(requests) < 2:
            return [self._answer(request, threading.Event()) for request in requests]
        given_up = threading.Event()
        num_threads = min(len(requests), self.config.max_connections)
        with ThreadPoolExecutor(num_threads, thread_name_prefix="pagedllm-remote") as pool:
            try:
                return list(pool.map(lambda request: self._answer(request, given_up), requests))
            except BaseException:
                given_up.set()
                for request in requests:
                    self._calls.abort(request.request_id)
                raise

    async def agenerate(self, requests: Sequence[GenerateRequest]) -> list[RequestOutput | PagedLLMError]:
        """As ``generate``, without blocking the event loop; cancelling it ends all requests."""
        self._check_open()
        places = asyncio.Semaphore(self.config.max_connections)

        async def answer(request: GenerateRequest) -> RequestOutput | PagedLLMError:
            async with places:
                return await self._aanswer(request)

        tasks = [asyncio.get_running_loop().create_task(answer(request)) for request in requests]
        try:
            return [await task for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    def stream(self, request: GenerateRequest) -> Generator[Chunk, None, None]:
        """Iterate over a request's chunks; it is sent with the first step. Closing or dropping the iterator ends it.

        Raises:
            PagedLLMError: While iterating, if the request is wrong or fails.
        """
        self._check_open()
        return self._stream(request)

    def astream(self, request: GenerateRequest) -> AsyncChunkReader:
        """As ``stream``, for an event loop."""
        self._check_open()
        return AsyncChunkReader(functools.partial(self._read, request))

    def abort(self, request_id: str) -> None:
        """End a request of this engine; its answer ends with finish reason ``abort``."""
        self._check_open()
        self._calls.abort(request_id)

    # --- Beside generation ---

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        body = wire.encode_tokenize_call(text, add_special_tokens=add_special_tokens)
        return wire.decode_tokens(self._post(wire.paths.TOKENIZE, body))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return wire.decode_text(self._post(wire.paths.DETOKENIZE, wire.encode_detokenize_call(token_ids)))

    def count_tokens(self, request: GenerateRequest) -> int:
        """Tokens of the request's prompt, or of its chat as the server's template renders it."""
        return wire.decode_count(self._post(wire.paths.TOKENIZE, wire.encode_count_call(request)))

    def model_info(self) -> ModelInfo:
        """The model, under the name by which the server serves it; asked for once."""
        if self._model is None:
            self._model = self._decode_model(self._fetch(self._outgoing("GET", wire.paths.MODELS)))
        return self._model

    @property
    def known_info(self) -> ModelInfo | None:
        """What ``model_info`` would say, if the server was asked already; never asks."""
        return self._model

    @property
    def served_model(self) -> str | None:
        """The name that requests ask for; None as long as it is the server's to say and has not been asked for."""
        return self.config.model or (self._model.model if self._model else None)

    def health(self) -> Health:
        """Whether the server can be reached and serves; never raises."""
        try:
            with self._call() as call, self._sync.exchange(call, self._outgoing("GET", wire.paths.HEALTH)):
                return Health(ok=True)
        except PagedLLMError as error:
            return Health(ok=False, reason=str(error))

    def stats(self) -> EngineStats:
        return wire.decode_stats(self._fetch(self._outgoing("GET", wire.paths.CACHE_STATS)))

    async def astats(self) -> EngineStats:
        return wire.decode_stats(await self._afetch(self._outgoing("GET", wire.paths.CACHE_STATS)))

    def match_prefix(self, request: GenerateRequest) -> int:
        """How many tokens of the request's prompt the server has cached now."""
        return wire.decode_match(self._post(wire.paths.CACHE_MATCH, self._body(request)))

    async def amatch_prefix(self, request: GenerateRequest) -> int:
        return wire.decode_match(await self._apost(wire.paths.CACHE_MATCH, self._body(request)))

    def warm(self, request: GenerateRequest) -> RequestOutput:
        """Let the server compute and cache the request's prompt and generate nothing."""
        return self._decode_output(request, self._post(wire.paths.CACHE_WARM, self._body(request)))

    async def awarm(self, request: GenerateRequest) -> RequestOutput:
        return self._decode_output(request, await self._apost(wire.paths.CACHE_WARM, self._body(request)))

    def reset_prefix_cache(self) -> None:
        """Let the server forget all cached prefixes; a server with keys allows it to its admin only."""
        self._post(wire.paths.CACHE_RESET, {})

    async def areset_prefix_cache(self) -> None:
        await self._apost(wire.paths.CACHE_RESET, {})

    def close(self) -> None:
        """Close the connections; what is in flight fails with EngineClosedError. The server goes on."""
        self.is_closed = True
        self._calls.abort_all()
        self._close_idle()
        self._async.close()

    async def aclose(self) -> None:
        self.is_closed = True
        self._calls.abort_all()
        await self._async.aclose()
        await asyncio.to_thread(self._close_idle)

    # --- One request, in a thread ---

    def _answer(self, request: GenerateRequest, given_up: threading.Event) -> RequestOutput | PagedLLMError:
        start = time.perf_counter()
        try:
            with self._call(request.request_id) as call:
                if given_up.is_set():
                    return aborted_output(request)
                outgoing = self._generation(request, self._served_model(call))
                with self._sync.exchange(call, outgoing) as response:
                    response.read()
                    return with_timings(self._decode_output(request, decode_json(response)), start)
        except Aborted:
            return aborted_output(request)
        except PagedLLMError as error:
            self._note(error)
            return error

    def _stream(self, request: GenerateRequest) -> Generator[Chunk, None, None]:
        progress = Progress(request)
        try:
            with self._call(request.request_id) as call:
                outgoing = self._generation(request, self._served_model(call), stream=True)
                with self._sync.exchange(call, outgoing) as response:
                    for event in httpx_sse.EventSource(response).iter_sse():
                        yield from progress.read(event, response)
                    yield from progress.finish()
        except Aborted:
            yield from progress.abort()
        except PagedLLMError as error:
            self._note(error)
            raise

    def _served_model(self, call: Call) -> str:
        if self.served_model is None:
            self._model = self._decode_model(self._fetch(self._outgoing("GET", wire.paths.MODELS), call))
        assert self.served_model is not None
        return self.served_model

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._fetch(self._outgoing("POST", path, body))

    def _fetch(self, outgoing: Outgoing, call: Call | None = None) -> dict[str, Any]:
        if call is None:
            with self._call() as call:
                return self._fetch(outgoing, call)
        with self._sync.exchange(call, outgoing) as response:
            response.read()
            return decode_json(response)

    # --- One request, in an event loop ---

    async def _aanswer(self, request: GenerateRequest) -> RequestOutput | PagedLLMError:
        start = time.perf_counter()
        try:
            with self._cancellable_call(request.request_id) as call:
                outgoing = self._generation(request, await self._aserved_model(call))
                async with self._async.exchange(outgoing) as response:
                    await response.aread()
                    return with_timings(self._decode_output(request, decode_json(response)), start)
        except Aborted:
            return aborted_output(request)
        except PagedLLMError as error:
            self._note(error)
            return error

    async def _read(self, request: GenerateRequest, mailbox: Mailbox) -> None:
        progress = Progress(request)
        try:
            with self._cancellable_call(request.request_id) as call:
                async with aclosing(self._events(request, progress, call)) as chunks:
                    async for chunk in chunks:
                        await mailbox.put(chunk)
        except Aborted:
            for chunk in progress.abort():
                mailbox.put_now(chunk)
        except PagedLLMError as error:
            self._note(error)
            raise

    async def _events(self, request: GenerateRequest, progress: Progress, call: Call) -> AsyncGenerator[Chunk, None]:
        outgoing = self._generation(request, await self._aserved_model(call), stream=True)
        async with self._async.exchange(outgoing) as response:
            async for event in httpx_sse.EventSource(response).aiter_sse():
                for chunk in progress.read(event, response):
                    yield chunk
            for chunk in progress.finish():
                yield chunk

    async def _aserved_model(self, call: Call) -> str:
        if self.served_model is None:
            self._model = self._decode_model(await self._afetch(self._outgoing("GET", wire.paths.MODELS), call))
        assert self.served_model is not None
        return self.served_model

    async def _apost(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self._afetch(self._outgoing("POST", path, body))

    async def _afetch(self, outgoing: Outgoing, call: Call | None = None) -> dict[str, Any]:
        if call is None:
            with self._cancellable_call() as call:
                return await self._afetch(outgoing, call)
        async with self._async.exchange(outgoing) as response:
            await response.aread()
            return decode_json(response)

    # --- Shared ---

    @contextmanager
    def _call(self, request_id: str | None = None) -> Iterator[Call]:
        """A call that ``abort`` finds; one without a name is aborted only by ``close``."""
        call = self._calls.begin(request_id or f"unnamed-{uuid.uuid4().hex}")
        try:
            yield call
        except Aborted:
            if self.is_closed:
                raise EngineClosedError("the engine was closed") from None
            raise
        finally:
            self._calls.end(call)

    @contextmanager
    def _cancellable_call(self, request_id: str | None = None) -> Iterator[Call]:
        """As ``_call``, for the running task: an abort cancels what it waits for, and is told from a cancellation."""
        loop, task, is_inside = asyncio.get_running_loop(), asyncio.current_task(), True
        assert task is not None

        def cancel() -> None:
            if is_inside:
                task.cancel()

        def interrupt() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(cancel)

        with self._call(request_id) as call:
            try:
                call.interruptible_by(interrupt)
                yield call
            except asyncio.CancelledError:
                # Since Python 3.11 a task counts its cancellations, so ours can be told from another's.
                num_others = task.uncancel() if call.aborted.is_set() and hasattr(task, "uncancel") else 0
                if not call.aborted.is_set() or num_others:
                    raise
                raise Aborted from None
            finally:
                is_inside = False
                call.interruptible_by(None)

    def _generation(self, request: GenerateRequest, model: str, *, stream: bool = False) -> Outgoing:
        path = wire.paths.GENERATE[wire.kind_of(request)]
        return self._outgoing("POST", path, wire.encode_call(request, model=model, stream=stream), stream=stream)

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        return wire.encode_call(request, model=self.served_model)

    def _outgoing(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, stream: bool = False
    ) -> Outgoing:
        in_api = path.startswith("/v1/")
        url = self.config.base_url + path.removeprefix("/v1") if in_api else self.config.root_url + path
        content = None if body is None else wire.dump_json(body)
        return Outgoing(config=self.config, method=method, url=url, body=content, stream=stream)

    def _decode_output(self, request: GenerateRequest, body: dict[str, Any]) -> RequestOutput:
        outputs = wire.decode_outputs(body, request_id=request.request_id)
        if len(outputs) != 1 or len(outputs[0].choices) != request.sampling.n:
            raise EngineError("the server answered with another number of choices than it was asked for")
        return outputs[0]

    def _decode_model(self, body: dict[str, Any]) -> ModelInfo:
        info = wire.decode_models(body, name=self.config.model)
        return dataclasses.replace(info, model=self.config.model or str(body["data"][0]["id"]))

    def _note(self, error: PagedLLMError) -> None:
        """A server that does not know its own model was started anew with another: ask again next time."""
        if isinstance(error, ModelNotFoundError):
            self._model = None

    def _check_open(self) -> None:
        if self.is_closed:
            raise EngineClosedError("the engine was closed")
