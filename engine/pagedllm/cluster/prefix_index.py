"""Which replicas hold which prefixes, by chained block hashes.

A chain is resident from its beginning: a block is only ever kept with all blocks before it. So the replicas that hold
the next block are among those that held the last, and a look-up is a walk that narrows a set until it is empty. Sets of
replicas are the bits of an integer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

__all__ = ["PrefixIndex"]


class PrefixIndex:
    """A map from block hash to the replicas that hold the block. Not thread-safe."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._slot_of: dict[str, int] = {}
        self._name_of: dict[int, str] = {}
        self._held: dict[str, set[bytes]] = {}
        self._free_slots: list[int] = []

    def __len__(self) -> int:
        """Blocks that are known, each counted once however many replicas hold it."""
        return len(self._holders)

    def __contains__(self, replica: str) -> bool:
        return replica in self._slot_of

    def num_held(self, replica: str) -> int:
        """Blocks that the replica holds."""
        return len(self._held[replica])

    def add_replica(self, replica: str) -> None:
        """Begin to keep account of a replica, which holds nothing yet; nothing happens if it is known."""
        if replica in self._slot_of:
            return
        slot = self._free_slots.pop() if self._free_slots else len(self._slot_of)
        self._slot_of[replica], self._name_of[slot], self._held[replica] = slot, replica, set()

    def forget_replica(self, replica: str) -> None:
        """Drop a replica with all that it held."""
        self.clear_replica(replica)
        slot = self._slot_of.pop(replica)
        del self._name_of[slot], self._held[replica]
        self._free_slots.append(slot)

    def clear_replica(self, replica: str) -> None:
        """The replica holds nothing any more."""
        self.remove(replica, tuple(self._held[replica]))

    def store(self, replica: str, hashes: Iterable[bytes]) -> None:
        """The replica holds these blocks."""
        bit, held, holders = 1 << self._slot_of[replica], self._held[replica], self._holders
        for block_hash in hashes:
            held.add(block_hash)
            holders[block_hash] = holders.get(block_hash, 0) | bit

    def remove(self, replica: str, hashes: Iterable[bytes]) -> None:
        """The replica does not hold these blocks any more; those that it never held are ignored."""
        bit, held, holders = 1 << self._slot_of[replica], self._held[replica], self._holders
        for block_hash in hashes:
            if block_hash not in held:
                continue
            held.remove(block_hash)
            rest = holders[block_hash] & ~bit
            if rest:
                holders[block_hash] = rest
            else:
                del holders[block_hash]

    def match(self, chain: Sequence[bytes], also: Mapping[bytes, int] | None = None) -> dict[str, int]:
        """How many blocks of a chain, from its beginning, each replica holds; those that hold none are left out.

        Args:
            chain: Hashes of a prompt's blocks, in order.
            also: Further holders of blocks, as bits of ``slot_bit``.
        """
        matched: dict[str, int] = {}
        candidates, depth = -1, 0
        for block_hash in chain:
            holders = self._holders.get(block_hash, 0)
            if also is not None:
                holders |= also.get(block_hash, 0)
            remaining = candidates & holders
            if remaining != candidates:
                if depth:
                    self._note(candidates & ~remaining, depth, matched)
                candidates = remaining
                if not candidates:
                    return matched
            depth += 1
        if depth:
            self._note(candidates, depth, matched)
        return matched

    def slot_bit(self, replica: str) -> int:
        """The bit that stands for a replica in ``also``; another one's after it was forgotten."""
        return 1 << self._slot_of[replica]

    def _note(self, bits: int, depth: int, matched: dict[str, int]) -> None:
        while bits:
            low = bits & -bits
            matched[self._name_of[low.bit_length() - 1]] = depth
            bits ^= low
