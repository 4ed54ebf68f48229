"""What each key has open, keeps pinned and has used; and its requests, kept apart from others'."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..api import CacheHints, GenerateRequest, HintOutcome, Usage
from ..errors import InvalidRequestError
from ..wire import GenerateCall
from .auth import ApiKey, KeyRing
from .config import ServerConfig
from .refusals import BUSY_KEY, FULL, NOT_ADMIN, Refusal

__all__ = ["Tenants", "Ticket"]


_Pin = tuple[str | None, bytes]


@dataclass
class _Account:
    """Figures of one key.

    Args:
        open_ids: Client's names of the calls that are open.
        pins: What ``retain`` keeps, by the client's ``prefix_key`` and the prompt: tokens, and until when on the
            monotonic clock.
    """

    open_ids: set[str] = field(default_factory=set)
    pins: dict[_Pin, tuple[int, float]] = field(default_factory=dict)
    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Ticket:
    """The right to have one call open; ``close`` gives it back."""

    def __init__(self, tenants: Tenants, key: ApiKey, request_id: str) -> None:
        self._tenants, self._key, self._request_id = tenants, key, request_id

    def close(self) -> None:
        self._tenants.leave(self._key, self._request_id)


class Tenants:
    """Accounts of all keys. Safe from many threads.

    Args:
        pool_tokens: How many tokens the engine's KV pool holds; a share of it bounds each key's pins.
    """

    def __init__(self, ring: KeyRing, config: ServerConfig, *, pool_tokens: int) -> None:
        self._ring = ring
        self._config = config
        self._accounts: dict[str, _Account] = {}
        self._lock = threading.Lock()
        self._pin_budget = config.max_pinned_tokens_per_key
        if self._pin_budget is None and len(ring.keys) > 1:
            self._pin_budget = pool_tokens // 2 // len(ring.keys)

    @property
    def num_open(self) -> int:
        with self._lock:
            return sum(len(account.open_ids) for account in self._accounts.values())

    def enter(self, key: ApiKey, request_id: str) -> Ticket:
        """Open a call.

        Raises:
            Refusal: As many as may are open, of all or of this key.
            InvalidRequestError: The key has one of this name open.
        """
        with self._lock:
            if sum(len(account.open_ids) for account in self._accounts.values()) >= self._config.max_open_requests:
                raise Refusal(FULL)
            account = self._account(key)
            if len(account.open_ids) >= self._config.open_requests_per_key:
                raise Refusal(BUSY_KEY)
            if request_id in account.open_ids:
                raise InvalidRequestError.for_value("request_id", request_id, "is already in flight")
            account.open_ids.add(request_id)
            account.num_requests += 1
        return Ticket(self, key, request_id)

    def leave(self, key: ApiKey, request_id: str) -> None:
        with self._lock:
            self._account(key).open_ids.discard(request_id)

    def scope(
        self, key: ApiKey, call: GenerateCall, count_tokens: Callable[[GenerateRequest], int]
    ) -> list[GenerateRequest]:
        """The call's requests under names and salts that no other key can use, without pins beyond the key's budget.

        Args:
            count_tokens: Of a request's prompt, which is the most that it can pin.

        Raises:
            Refusal: It sets a priority and may not.
        """
        scoped = []
        for request in call.requests:
            if request.hints.priority and not key.is_admin:
                raise Refusal(dataclasses.replace(NOT_ADMIN, param="priority"))
            hints = self.scope_hints(key, request.hints)
            if hints.retain and self._pin_budget is not None and not self._book(key, request, count_tokens(request)):
                hints = dataclasses.replace(hints, retain=())
            scoped.append(dataclasses.replace(request, request_id=uuid.uuid4().hex, hints=hints))
        return scoped

    def scope_hints(self, key: ApiKey, hints: CacheHints) -> CacheHints:
        prefix_key = hints.prefix_key
        if prefix_key is not None and self._ring.keys:
            prefix_key = self._ring.scoped(key, "prefix_key", prefix_key)
        return dataclasses.replace(hints, salt=self._ring.salt_of(key, hints.salt), prefix_key=prefix_key)

    def settle(
        self, key: ApiKey, asked: GenerateRequest, sent: GenerateRequest, usage: Usage, outcomes: Sequence[HintOutcome]
    ) -> tuple[HintOutcome, ...]:
        """Book what a request used and pinned.

        Args:
            asked: The request as the client sent it.
            sent: As the engine got it.

        Returns:
            The outcomes for the client, those that the engine never saw among them.
        """
        with self._lock:
            account = self._account(key)
            account.prompt_tokens += usage.prompt_tokens
            account.cached_tokens += usage.cached_tokens
            account.completion_tokens += usage.completion_tokens
            if asked.hints.release:
                _forget(account, asked)
            if sent.hints.retain:
                pinned = max((item.num_tokens for item in outcomes if item.hint == "retain"), default=0)
                account.pins[_pin_of(asked)] = (pinned, time.monotonic() + _ttl_of(asked))
        if asked.hints.retain and not sent.hints.retain:
            refused = HintOutcome(hint="retain", outcome="rejected", reason="this API key pins as much as it may")
            return (*outcomes, *(refused for _ in asked.hints.retain))
        return tuple(outcomes)

    def figures(self, key: ApiKey) -> dict[str, object]:
        """What one key used so far, as JSON."""
        with self._lock:
            account = self._account(key)
            return {
                "name": key.name,
                "num_requests": account.num_requests,
                "num_open": len(account.open_ids),
                "prompt_tokens": account.prompt_tokens,
                "cached_tokens": account.cached_tokens,
                "completion_tokens": account.completion_tokens,
                "pinned_tokens": _num_pinned(account),
            }

    def _account(self, key: ApiKey) -> _Account:
        return self._accounts.setdefault(key.name, _Account())

    def _book(self, key: ApiKey, request: GenerateRequest, num_tokens: int) -> bool:
        """Count a pin before it is made, so that requests side by side cannot exceed the budget; False if they would.

        What is booked lasts as long as the pin of a request that ends as late as it may; ``settle`` knows better.
        """
        with self._lock:
            account, pin = self._account(key), _pin_of(request)
            renewed, _ = account.pins.get(pin, (0, 0.0))
            if _num_pinned(account) - renewed + num_tokens > (self._pin_budget or 0):
                return False
            until = time.monotonic() + _ttl_of(request) + self._config.request_timeout_s
            account.pins[pin] = (num_tokens, until)
            return True


def _ttl_of(request: GenerateRequest) -> float:
    return max(place.ttl_s for place in request.hints.retain)


def _num_pinned(account: _Account) -> int:
    now = time.monotonic()
    for pin in [pin for pin, (_, until) in account.pins.items() if until <= now]:
        del account.pins[pin]
    return sum(num_tokens for num_tokens, _ in account.pins.values())


def _pin_of(request: GenerateRequest) -> _Pin:
    """What tells pins apart, so that renewing one does not count twice and another prompt is never taken for it."""
    prompt = repr((request.prompt, request.messages, request.hints.salt))
    return request.hints.prefix_key, hashlib.sha256(prompt.encode()).digest()


def _forget(account: _Account, request: GenerateRequest) -> None:
    """Drop what a request releases: all pins of its key, or those of its prompt."""
    prefix_key, digest = _pin_of(request)
    for pin in list(account.pins):
        if pin[0] == prefix_key if prefix_key is not None else pin[1] == digest:
            del account.pins[pin]
