"""A model without weights whose every token depends on all the KV that it reads: a wrong block is a wrong token."""

from __future__ import annotations

from pagedllm.control.scheduler import Scheduler, SchedulerOutput
from pagedllm.control.sequence import Sequence

__all__ = ["FakeModel", "expected_tokens"]

_PRIME = (1 << 61) - 1
_VOCAB = 7


def _next_value(previous: int, token_id: int) -> int:
    return (previous * 1_000_003 + token_id + 1) % _PRIME


def _next_token(values: list[int]) -> int:
    return sum((i + 1) * value for i, value in enumerate(values)) % _PRIME % _VOCAB


def expected_tokens(prompt: list[int], num_tokens: int) -> list[int]:
    """What the model says after a prompt when nothing ever goes wrong."""
    values: list[int] = []
    for token_id in prompt:
        values.append(_next_value(values[-1] if values else 0, token_id))
    tokens: list[int] = []
    for _ in range(num_tokens):
        tokens.append(_next_token(values))
        values.append(_next_value(values[-1], tokens[-1]))
    return tokens


class FakeModel:
    """Runs a scheduler's steps on two pools of numbers."""

    def __init__(self, scheduler: Scheduler) -> None:
        manager = scheduler.kv_cache_manager
        self.scheduler = scheduler
        self.block_size = manager.block_size
        self._device = [[-1] * self.block_size for _ in range(manager.pool.num_blocks)]
        self._host = [[-1] * self.block_size for _ in range(manager.host.pool.num_blocks)]

    def step(self) -> SchedulerOutput:
        """Schedule, copy, compute, update and retire; every invariant is checked."""
        output = self.scheduler.schedule()
        assert output.sequences
        self._copy(output)
        self._check_writes(output)
        tokens: dict[Sequence, int] = {}
        for sequence, num_new_tokens in zip(output.sequences, output.nums_new_tokens, strict=True):
            end = sequence.num_computed_tokens + num_new_tokens
            for position in range(sequence.num_computed_tokens, end):
                self._write(sequence, position)
            values = self._read(sequence, end)
            tokens[sequence] = _next_token(values)
        self.scheduler.update(output, [tokens[sequence] for sequence in output.sampled])
        self.scheduler.retire_finished()
        self.scheduler.check_integrity()
        return output

    def run_until_idle(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"still work after {max_steps} steps")

    def _copy(self, output: SchedulerOutput) -> None:
        pools = {"out": (self._device, self._host), "in": (self._host, self._device)}
        for copy in output.copies:
            source, target = pools.get(copy.kind, (self._device, self._device))
            target[copy.target] = list(source[copy.source])

    def _check_writes(self, output: SchedulerOutput) -> None:
        """Nobody writes a block that somebody else reads."""
        for sequence in output.sequences:
            first = sequence.num_computed_tokens // self.block_size
            for block_id in sequence.block_table[first:]:
                assert self.scheduler.kv_cache_manager.pool.ref_counts[block_id] == 1, "a shared block is written"

    def _write(self, sequence: Sequence, position: int) -> None:
        block, slot = divmod(position, self.block_size)
        previous = self._read(sequence, position)[-1] if position else 0
        value = _next_value(previous, sequence.token_ids[position])
        self._device[sequence.block_table[block]][slot] = value

    def _read(self, sequence: Sequence, num_tokens: int) -> list[int]:
        values: list[int] = []
        for block_id in sequence.block_table[: -(-num_tokens // self.block_size)]:
            values += self._device[block_id]
        return values[:num_tokens]
