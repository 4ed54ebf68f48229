"""Pins: prefixes that stay on the device for a while although nobody uses them."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..api import HintOutcome
from .prefix_cache import PrefixCache

__all__ = ["Pins"]

_MAX_DEFERRED = 64


@dataclass(eq=False, slots=True)
class _Pin:
    """Keeps one node and its ancestors. The heap of expiries may still hold it after it is gone."""

    node: int
    num_blocks: int
    key: str | None
    salt: str | None
    expires: float
    is_held: bool = True


@dataclass(frozen=True, slots=True)
class _Deferred:
    """A pin that waits for room: by its tokens, because its nodes may be gone by then."""

    token_ids: tuple[int, ...]
    key: str | None
    salt: str | None
    expires: float


class Pins:
    """The pins on one prefix cache, within a budget.

    Args:
        cache: What they keep.
        max_blocks: Most blocks that pins may hold together.
    """

    def __init__(self, cache: PrefixCache, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._cache = cache
        self._pins: dict[tuple[int, str | None], _Pin] = {}
        self._by_expiry: list[tuple[float, int, _Pin]] = []
        self._deferred: deque[_Deferred] = deque()
        self._num_made = 0

    def __len__(self) -> int:
        return len(self._pins)

    def pin(
        self, token_ids: Sequence[int], nodes: Sequence[int], *, key: str | None, salt: str | None, ttl_s: float
    ) -> HintOutcome:
        """Pin a path of device nodes, or as much from its beginning as the budget allows.

        Args:
            token_ids: The tokens of the path.
            nodes: Its nodes, from the root's child on.
            key: By what to release it.
            salt: Whose prefix it is.
            ttl_s: Seconds from now until it goes by itself.

        Returns:
            ``accepted``; ``clipped`` to fewer tokens; ``deferred`` until other pins go, if that is before this one
            would; or ``rejected``.
        """
        size, now = self._cache.block_size, self._cache.now
        num_held = next((i for i in range(len(nodes), 0, -1) if self._cache.is_pinned(nodes[i - 1])), 0)
        num_blocks = min(len(nodes), num_held + max(self.max_blocks - self._cache.num_pinned, 0))
        if num_blocks:
            self._hold(nodes[num_blocks - 1], num_blocks, key, salt, now + ttl_s)
            if num_blocks == len(nodes):
                return HintOutcome(hint="retain", outcome="accepted", num_tokens=num_blocks * size)
            reason = f"pins hold at most {self.max_blocks} blocks together"
            return HintOutcome(hint="retain", outcome="clipped", num_tokens=num_blocks * size, reason=reason)
        self._skip_released()
        if not self._by_expiry or self._by_expiry[0][0] >= now + ttl_s or len(self._deferred) >= _MAX_DEFERRED:
            reason = f"pins hold at most {self.max_blocks} blocks together, and none goes in time"
            return HintOutcome(hint="retain", outcome="rejected", reason=reason)
        self._deferred.append(_Deferred(tuple(token_ids[: len(nodes) * size]), key, salt, now + ttl_s))
        reason = f"pins hold {self.max_blocks} blocks, as many as they may; it will be pinned when one of them goes"
        return HintOutcome(hint="retain", outcome="deferred", reason=reason)

    def release(self, nodes: Sequence[int], *, key: str | None, salt: str | None) -> HintOutcome:
        """Let go of the pins made under ``key``, or, without one, of those on a path."""
        path = frozenset(nodes)
        found = [
            pin for pin in self._pins.values() if pin.salt == salt and (pin.key == key if key else pin.node in path)
        ]
        for pin in found:
            self._let_go(pin)
        if key:
            self._deferred = deque(item for item in self._deferred if (item.key, item.salt) != (key, salt))
        if not found:
            reason = f"nothing is pinned under {key!r}" if key else "nothing is pinned on this prompt's prefix"
            return HintOutcome(hint="release", outcome="missing", reason=reason)
        self.make_good()
        num_tokens = max(pin.num_blocks for pin in found) * self._cache.block_size
        return HintOutcome(hint="release", outcome="accepted", num_tokens=num_tokens)

    def expire(self) -> None:
        """Let go of pins whose time is over, and pin what waited for their room."""
        self._skip_released()
        if not self._by_expiry or self._by_expiry[0][0] > self._cache.now:
            return
        while self._by_expiry and self._by_expiry[0][0] <= self._cache.now:
            self._let_go(self._by_expiry[0][2])
            self._skip_released()
        self.make_good()

    def give_way(self) -> bool:
        """Let go of the pin that would go first; False if there is none."""
        self._skip_released()
        if not self._by_expiry:
            return False
        self._let_go(self._by_expiry[0][2])
        return True

    def make_good(self) -> None:
        """Pin what was deferred, as far as it is still cached and there is room now."""
        for _ in range(len(self._deferred)):
            item = self._deferred.popleft()
            num_blocks = len(item.token_ids) // self._cache.block_size
            nodes = self._cache.match(item.token_ids, item.salt, num_blocks)
            nodes = [node for node in nodes if not self._cache.is_on_host(node)]
            if not nodes or item.expires <= self._cache.now:
                continue
            if self._cache.num_pinned >= self.max_blocks:
                self._deferred.append(item)
                continue
            ttl_s = item.expires - self._cache.now
            self.pin(item.token_ids, nodes, key=item.key, salt=item.salt, ttl_s=ttl_s)

    def clear(self) -> None:
        """Forget all pins, because the cache is about to forget all nodes."""
        self._pins.clear()
        self._by_expiry.clear()
        self._deferred.clear()

    def check_integrity(self) -> None:
        """Verify the cache's count of pinned blocks against the pins."""
        path: set[int] = set()
        for pin in self._pins.values():
            assert pin.is_held
            assert self._cache.is_pinned(pin.node)
            path.update(self._cache.path_to(pin.node))
        assert len(path) == self._cache.num_pinned <= self.max_blocks, "pinned blocks are miscounted"

    def _hold(self, node: int, num_blocks: int, key: str | None, salt: str | None, expires: float) -> None:
        old = self._pins.get((node, key))
        if old is not None and old.expires >= expires:
            return
        self._cache.pin(node)
        if old is not None:
            self._let_go(old)
        pin = self._pins[(node, key)] = _Pin(node, num_blocks, key, salt, expires)
        self._num_made += 1
        heapq.heappush(self._by_expiry, (expires, self._num_made, pin))
        if len(self._by_expiry) > 2 * len(self._pins) + 64:
            self._by_expiry = sorted(entry for entry in self._by_expiry if entry[2].is_held)

    def _let_go(self, pin: _Pin) -> None:
        pin.is_held = False
        del self._pins[(pin.node, pin.key)]
        self._cache.unpin(pin.node)

    def _skip_released(self) -> None:
        while self._by_expiry and not self._by_expiry[0][2].is_held:
            heapq.heappop(self._by_expiry)
