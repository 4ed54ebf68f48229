"""What arrives at a simulated cluster: from a file, or conversations made up by a seed."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import ConfigError

__all__ = ["TraceRequest", "conversations", "read_trace", "scaled"]

# Tokens that one of a trace file's hash ids stands for.
_HASH_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """One request of a trace.

    Args:
        arrival_s: When, from the beginning.
        prompt: Its tokens as segments ``(first token id, number of tokens)`` of consecutive ids.
        output_len: Tokens to generate.
        session: What it belongs to, if that is known.
    """

    arrival_s: float
    prompt: tuple[tuple[int, int], ...]
    output_len: int
    session: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(count for _, count in self.prompt)

    def token_ids(self) -> list[int]:
        return list(itertools.chain.from_iterable(range(first, first + count) for first, count in self.prompt))


def conversations(
    num_requests: int,
    *,
    seed: int,
    num_sessions: int,
    num_system_prompts: int = 8,
    system_len: int = 512,
    turn_len: int = 128,
    output_len: int = 64,
    max_len: int = 4096,
) -> list[TraceRequest]:
    """Turns of many conversations, in random order, one a second: a turn's prompt is all before it and a new message.

    Args:
        num_sessions: Conversations that go on side by side; one that is longer than ``max_len`` begins anew.
        num_system_prompts: Beginnings that they share; the first is most frequent (by 1/rank).
        turn_len: Mean tokens of a message; exponentially distributed, at least 8.
        output_len: Mean tokens of an answer, likewise.
    """
    rng = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(num_system_prompts)]
    fresh = itertools.count(num_system_prompts * system_len, 8192)
    histories: dict[int, list[tuple[int, int]]] = {}
    requests = []
    for number in range(num_requests):
        session = rng.randrange(num_sessions)
        history = histories.get(session)
        if history is None or sum(count for _, count in history) + 2 * turn_len > max_len:
            (system,) = rng.choices(range(num_system_prompts), weights)
            history = histories[session] = [(system * system_len, system_len)]
        history.append((next(fresh), _length(rng, turn_len)))
        answer_len = _length(rng, output_len)
        requests.append(
            TraceRequest(
                arrival_s=float(number), prompt=tuple(history), output_len=answer_len, session=f"session-{session}"
            )
        )
        # As the client sends the answer back. The engine's own tokens are others, so that it is computed anew.
        history.append((next(fresh), answer_len))
    return requests


def read_trace(path: Path, *, max_requests: int | None = None) -> list[TraceRequest]:
    """A JSON Lines file with ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids`` in each line.

    That is the format of Mooncake's published traces: each id stands for 512 tokens of a prompt, equal ids for equal
    tokens after equal ones.

    Raises:
        ConfigError: The file is not that.
    """
    requests: list[TraceRequest] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if max_requests is not None and len(requests) >= max_requests:
                    break
                if line.strip():
                    requests.append(_parse(json.loads(line), number))
    except OSError as error:
        raise ConfigError(f"the trace {str(path)!r} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the trace {str(path)!r}, line {number}: {error!r}") from error
    if not requests:
        raise ConfigError(f"the trace {str(path)!r} has no requests")
    return sorted(requests, key=lambda request: request.arrival_s)


def scaled(requests: Sequence[TraceRequest], *, rate: float, seed: int) -> list[TraceRequest]:
    """The same requests in the same order, arriving at random (a Poisson process) at a mean rate per second."""
    rng, now = random.Random(seed), 0.0
    arriving = []
    for request in requests:
        now += rng.expovariate(rate)
        arriving.append(replace(request, arrival_s=now))
    return arriving


def _parse(line: Any, number: int) -> TraceRequest:
    length, output_len = int(line["input_length"]), int(line["output_length"])
    if length < 1 or output_len < 1:
        raise ValueError("lengths must be at least 1")
    prompt, left = [], length
    for hash_id in line["hash_ids"]:
        count = min(left, _HASH_TOKENS)
        if count > 0:
            prompt.append((int(hash_id) * _HASH_TOKENS % (1 << 31), count))
        left -= count
    if left > 0:  # tokens after the last id: this line's own
        prompt.append(((1 << 31) + number * _HASH_TOKENS % (1 << 30), left))
    return TraceRequest(arrival_s=float(line["timestamp"]) / 1000, prompt=tuple(prompt), output_len=output_len)


def _length(rng: random.Random, mean: int) -> int:
    return max(8, min(8 * mean, round(rng.expovariate(1 / mean))))
