"""The four ways to ask a remote engine, and servers that answer it by a script."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from engine_helpers import request
from scripted_server import Exchange, chat_event

from pagedllm.api import GenerateRequest, Message
from pagedllm.errors import PagedLLMError
from pagedllm.remote import RemoteEngine

CHAT = "/v1/chat/completions"
ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello!"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}
Ways = Callable[[RemoteEngine, GenerateRequest], Any]


def chat(**sampling: Any) -> GenerateRequest:
    return request([Message(role="user", content="Hi")], **sampling)


def generate(engine: RemoteEngine, asked: GenerateRequest) -> str:
    (output,) = engine.generate([asked])
    if isinstance(output, PagedLLMError):
        raise output
    return output.text


def stream(engine: RemoteEngine, asked: GenerateRequest) -> str:
    return "".join(chunk.text for chunk in engine.stream(asked))


def agenerate(engine: RemoteEngine, asked: GenerateRequest) -> str:
    (output,) = asyncio.run(engine.agenerate([asked]))
    if isinstance(output, PagedLLMError):
        raise output
    return output.text


def astream(engine: RemoteEngine, asked: GenerateRequest) -> str:
    async def collect() -> str:
        return "".join([chunk.text async for chunk in engine.astream(asked)])

    return asyncio.run(collect())


WAYS = pytest.mark.parametrize("ask", [generate, stream, agenerate, astream])


def answer(exchange: Exchange) -> None:
    """As vLLM does: OpenAI's fields and no others."""
    if not exchange.body.get("stream"):
        return exchange.json(ANSWER)
    exchange.begin_events()
    exchange.event(chat_event(""))
    for word in ("Hel", "lo!"):
        exchange.event(chat_event(word))
    exchange.event(chat_event("", "stop"))
    if exchange.body["stream_options"]["include_usage"]:
        exchange.event({**chat_event(""), "choices": [], "usage": ANSWER["usage"]})
    exchange.event("[DONE]")
    return exchange.end_events()


def busy(exchange: Exchange) -> None:
    exchange.json({"error": {"message": "busy", "code": "queue_full"}}, 503, Retry_After="0")


class Endless:
    """Streams for ever, or waits, until the client goes."""

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()

    def __call__(self, exchange: Exchange) -> None:
        self.begun.set()
        try:
            if exchange.body.get("stream"):
                exchange.begin_events()
                while True:
                    exchange.event(chat_event("word "))
                    time.sleep(0.01)
            elif exchange.wait_for_hang_up():
                self.ended.set()
        except OSError:
            self.ended.set()
            raise
