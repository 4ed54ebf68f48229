"""One call from its first token to its last: run, sent, and ended early when nobody waits for it any more."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
import traceback
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..api import AsyncChunkStream, Chunk, GenerateRequest, RequestOutput
from ..assemble import assemble_output
from ..errors import PagedLLMError
from ..wire import (
    DONE,
    AnswerForm,
    Echo,
    GenerateCall,
    HttpError,
    StreamEncoder,
    dump_json,
    encode_error,
    encode_outputs,
)
from .auth import ApiKey
from .echo import echo_of
from .merge import merged
from .refusals import TIMED_OUT, Refusal
from .service import Service
from .tenants import Ticket

__all__ = ["Answer", "PreparedCall", "error_of"]

logger = logging.getLogger(__name__)

_JSON = [(b"content-type", b"application/json")]
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # asks proxies to pass events on at once
]


@dataclass(frozen=True, kw_only=True)
class PreparedCall:
    """A call that has passed all checks.

    Args:
        requests: The call's requests as the engine gets them.
        echoes: Texts of the prompts, if they are to be echoed.
        prompt_tokens: Of each request, if the usage so far is to be told.
        ticket: Closed when the call has ended.
    """

    call: GenerateCall
    key: ApiKey
    requests: Sequence[GenerateRequest]
    echoes: Sequence[Echo]
    prompt_tokens: Sequence[int]
    ticket: Ticket


class Answer(Response):
    """Runs a call and sends its answer, as one JSON object or as server-sent events.

    The call ends early, and the engine stops computing it, when the client is gone, when it takes longer than it may,
    when the client does not read, and when the server ends all calls. An error before the first token is an HTTP
    status, later one an event that ends the stream.
    """

    def __init__(self, service: Service, prepared: PreparedCall) -> None:
        super().__init__()
        self._service, self._prepared = service, prepared
        self._form = AnswerForm(
            kind=prepared.call.kind,
            request_id=prepared.call.request_id,
            model=service.model_name,
            created=int(time.time()),
            return_token_ids=prepared.call.return_token_ids,
        )
        self._has_started = False
        self._is_sending = False

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        # Why to end early: an error to tell, or None when nobody is there to be told.
        self._early: asyncio.Future[HttpError | None] = loop.create_future()
        self._send = send
        work = loop.create_task(self._run())
        gone = loop.create_task(self._watch_client(receive))
        timer = loop.call_later(self._service.config.request_timeout_s, self._end, TIMED_OUT)
        self._service.register(self._end)
        try:
            waiting: set[asyncio.Future[Any]] = {work, self._early}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if self._early.done() and not work.done():
                error = self._early.result()
                reason = "client_gone" if error is None else error.code or "error"
                self._service.metrics.count_rejection(reason)
                # A send that hangs will not take an error either.
                was_sending = self._is_sending
                await _cancelled(work)
                if error is not None and not was_sending:
                    await self._send_error(error)
            else:
                await work
        finally:
            self._service.unregister(self._end)
            timer.cancel()
            await _cancelled(gone)
            await _cancelled(work)
            self._prepared.ticket.close()

    async def _run(self) -> None:
        try:
            streams = await self._service.in_thread(self._start)
            try:
                if self._prepared.call.stream:
                    await self._send_events(streams)
                else:
                    await self._send_object(streams)
            finally:
                for stream in streams:
                    await stream.aclose()
        except Exception as error:
            http_error = error_of(error)
            self._service.metrics.count_rejection(http_error.code or "error")
            await self._send_error(http_error)

    def _start(self) -> list[AsyncChunkStream]:
        """Hand the requests to the engine, which renders and encodes their prompts: off the event loop."""
        return [self._service.engine.astream(request) for request in self._prepared.requests]

    async def _send_object(self, streams: Sequence[AsyncChunkStream]) -> None:
        collected: list[list[Chunk]] = [[] for _ in streams]
        async for place, chunk in self._chunks(streams):
            collected[place].append(chunk)
        outputs = [assemble_output(chunks) for chunks in collected]
        echoes = self._echoes(outputs)
        body = dump_json(encode_outputs(self._form, outputs, echoes))
        await self._send_head(200, [*_JSON, (b"content-length", str(len(body)).encode())])
        await self._send_body(body, more=False)

    async def _send_events(self, streams: Sequence[AsyncChunkStream]) -> None:
        prepared = self._prepared
        chunks = self._chunks(streams)
        echoes = prepared.echoes
        if prepared.call.echo and prepared.requests[0].sampling.prompt_logprobs is not None:
            # The prompt's log probabilities stand at the text's beginning and come with its last chunk.
            held = [item async for item in chunks]
            outputs = [assemble_output([c for at, c in held if at == place]) for place in range(len(streams))]
            chunks, echoes = _again(held), self._echoes(outputs)
        encoder = StreamEncoder(
            self._form,
            num_choices=prepared.requests[0].sampling.n,
            echoes=echoes,
            prompt_tokens=prepared.prompt_tokens,
        )
        async for place, chunk in chunks:
            if not self._has_started:
                await self._send_head(200, _EVENTS)
            events = encoder.encode(chunk, place=place)
            await self._send_body(b"".join(b"data: %b\n\n" % dump_json(event) for event in events))
        if prepared.call.include_usage:
            await self._send_body(b"data: %b\n\n" % dump_json(encoder.usage_event()))
        await self._send_body(b"data: %b\n\n" % DONE.encode(), more=False)

    async def _chunks(self, streams: Sequence[AsyncChunkStream]) -> AsyncIterator[tuple[int, Chunk]]:
        """All chunks, each with the place of its request; what ends is booked, under the client's own names."""
        prepared, service = self._prepared, self._service
        last_seen: dict[tuple[int, int], float] = {}
        async for place, chunk in merged(streams):
            now = time.perf_counter()
            before = last_seen.get((place, chunk.index))
            if before is not None:
                service.metrics.observe_gap(now - before)
            last_seen[place, chunk.index] = now
            if chunk.usage is None:
                yield place, chunk
                continue
            asked, sent = prepared.call.requests[place], prepared.requests[place]
            hints = service.tenants.settle(prepared.key, asked, sent, chunk.usage, chunk.hints)
            service.metrics.observe_end(chunk)
            yield place, dataclasses.replace(chunk, request_id=asked.request_id, hints=hints)

    def _echoes(self, outputs: Sequence[RequestOutput]) -> list[Echo]:
        return [
            echo_of(echo, output.prompt_logprobs) for echo, output in zip(self._prepared.echoes, outputs, strict=False)
        ]

    async def _watch_client(self, receive: Receive) -> None:
        # Ray Serve cancels what it hears a client with when the client is gone, and receive() then raises.
        with contextlib.suppress(Exception):
            while (await receive())["type"] != "http.disconnect":
                pass
        self._end(None)

    def _end(self, error: HttpError | None) -> None:
        if not self._early.done():
            self._early.set_result(error)

    async def _send_head(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._has_started = True
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def _send_body(self, body: bytes, *, more: bool = True) -> None:
        """Send; a client that does not read for too long is taken for gone."""
        timer = asyncio.get_running_loop().call_later(self._service.config.idle_timeout_s, self._end, TIMED_OUT)
        self._is_sending = True
        try:
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
        finally:
            self._is_sending = False
            timer.cancel()

    async def _send_error(self, error: HttpError) -> None:
        """As an HTTP status if nothing was sent yet, else as the stream's last event."""
        body = dump_json(error.body())
        if self._has_started:
            await self._send_body(b"data: %b\n\n" % body, more=False)
            return
        headers = [(name.lower().encode(), value.encode()) for name, value in error.all_headers().items()]
        await self._send_head(error.status, [*_JSON, (b"content-length", str(len(body)).encode()), *headers])
        await self._send_body(body, more=False)


def error_of(error: Exception) -> HttpError:
    """What a client is told. A fault of ours is logged without its message, which may quote the request."""
    if isinstance(error, Refusal):
        return error.error
    if not isinstance(error, PagedLLMError):
        frames = "".join(traceback.format_tb(error.__traceback__))
        logger.error("a request failed: %s\n%s", type(error).__name__, frames)
    return encode_error(error)


async def _again(items: Sequence[tuple[int, Chunk]]) -> AsyncIterator[tuple[int, Chunk]]:
    for item in items:
        yield item


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it has let go of everything."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
