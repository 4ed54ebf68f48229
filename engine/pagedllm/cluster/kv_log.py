"""A replica's account of what its prefix cache holds, for routers that ask what has changed since they last did."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..control.kv_events import KVEvent

__all__ = ["KVLog", "KVUpdate"]

_MAX_CHANGES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class KVUpdate:
    """What changed between two numbers of a log.

    Args:
        as_of: Number of the last change that is in here.
        stored: Blocks that are held now, of those that changed; of all blocks in a snapshot.
        removed: Blocks that changed and are not held now.
        is_snapshot: Whether the reader is to forget what it knew.
    """

    as_of: int
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    is_snapshot: bool = False


class KVLog:
    """Numbers the changes and remembers the last of them. Safe from many threads.

    Args:
        max_changes: How many to remember; who asks for older ones gets a snapshot.
        on_change: Called after each change, by the thread that made it; must be quick.
    """

    def __init__(self, max_changes: int = _MAX_CHANGES, on_change: Callable[[], None] = lambda: None) -> None:
        self._lock = threading.Lock()
        self._changed: deque[bytes] = deque(maxlen=max_changes)
        self._held: set[bytes] = set()
        self._as_of = 0
        self._cleared_at = 0
        self._on_change = on_change

    @property
    def as_of(self) -> int:
        """Number of the last change."""
        return self._as_of

    def record(self, event: KVEvent) -> None:
        """Take note of an event of the prefix cache (its thread)."""
        with self._lock:
            self._as_of += 1
            if event.kind == "cleared":
                self._held.clear()
                self._changed.clear()
                self._cleared_at = self._as_of
            else:
                self._changed.append(event.block_hash)
                if event.kind == "stored":
                    self._held.add(event.block_hash)
                else:
                    self._held.discard(event.block_hash)
        self._on_change()

    def since(self, number: int | None) -> KVUpdate:
        """What changed after a number; all that is held for who has none, or one too old to tell."""
        with self._lock:
            num_missed = self._as_of - (-1 if number is None else number)
            if number is None or number < self._cleared_at or num_missed > len(self._changed) or num_missed < 0:
                return KVUpdate(as_of=self._as_of, stored=tuple(self._held), is_snapshot=True)
            touched = set(itertools.islice(reversed(self._changed), num_missed))
            return KVUpdate(as_of=self._as_of, stored=tuple(touched & self._held), removed=tuple(touched - self._held))

    def num_held(self, chain: Sequence[bytes]) -> tuple[int, int]:
        """How many blocks of a chain, from its beginning, are held; and as of which change."""
        with self._lock:
            for count, block_hash in enumerate(chain):
                if block_hash not in self._held:
                    return count, self._as_of
            return len(chain), self._as_of
