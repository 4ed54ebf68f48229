"""One HTTP request as both the threads' and the event loops' side send it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from .config import RemoteConfig
from .http_errors import answer_error

__all__ = ["KEEPALIVE_S", "Outgoing", "araise_for_status", "client_options", "raise_for_status"]

# Below the 5 s after which uvicorn closes an idle connection: who writes into a closing one cannot tell whether the
# request was read, so it could not be sent again.
KEEPALIVE_S = 4.0


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """A request that has not been sent, or not for the last time.

    Args:
        config: For the times that it may take.
        method: ``GET`` or ``POST``.
        url: Of the endpoint.
        body: Its JSON, encoded; None for a request without one.
        stream: Whether the answer is a stream of events, of which only the gaps are limited.
    """

    config: RemoteConfig
    method: str
    url: str
    body: bytes | None = None
    stream: bool = False

    def build(
        self, client: httpx.Client | httpx.AsyncClient, trace: Callable[[str, dict[str, Any]], None] | None = None
    ) -> httpx.Request:
        limits, headers = self.config, {}
        if self.body is not None:
            headers["content-type"] = "application/json"
        if self.stream:
            headers |= {"accept": "text/event-stream", "cache-control": "no-store"}
        return client.build_request(
            self.method,
            self.url,
            content=self.body,
            headers=headers,
            # Who waits for a free connection is not limited by time: it gets one when another request ends.
            timeout=httpx.Timeout(limits.read_timeout_s, connect=limits.connect_timeout_s, pool=None),
            extensions={} if trace is None else {"trace": trace},
        )

    def head_arrived(self, request: httpx.Request) -> None:
        """From now on, what is waited for is the next event."""
        if self.stream:
            request.extensions["timeout"]["read"] = self.config.stream_idle_timeout_s


def client_options(config: RemoteConfig) -> dict[str, Any]:
    """What all clients share."""
    headers = {"user-agent": "pagedllm"}
    if config.api_key is not None:
        headers["authorization"] = f"Bearer {config.api_key}"
    return {"headers": headers}


def raise_for_status(response: httpx.Response) -> None:
    """Raise what an answer that is no success stands for; reads its body.

    Raises:
        PagedLLMError: With the answer as its ``response``.
    """
    if not response.is_success:
        response.read()
        raise answer_error(response)


async def araise_for_status(response: httpx.Response) -> None:
    """As ``raise_for_status``, of an event loop's client."""
    if not response.is_success:
        await response.aread()
        raise answer_error(response)
