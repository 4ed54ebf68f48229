"""What an ingress and a replica send each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..api import Chunk, GenerateRequest
from ..errors import PagedLLMError
from .kv_log import KVUpdate
from .routing import ReplicaLoad, RouteQuery

__all__ = ["Acknowledgement", "Call", "News", "Reply", "Target"]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A request for any replica.

    Args:
        query: What the router goes by.
        token_ids: The prompt, encoded; None where the request has token ids already.
    """

    request: GenerateRequest
    query: RouteQuery
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Target:
    """Goes before the arguments of a call that is for one replica; any other one answers None."""

    replica: str


@dataclass(frozen=True, kw_only=True)
class Acknowledgement:
    """How much of a request's prompt a replica holds, and how busy it is.

    Args:
        num_held: Blocks of the chain, from its beginning.
        as_of: Number of the change in the replica's log after which this was so.
    """

    num_held: int
    as_of: int
    load: ReplicaLoad


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A piece of an answer.

    Args:
        replica: Who answers.
        acknowledgement: With the first chunk and with the last.
        error: Ends the answer. It travels as a value, because an exception would be logged with what the request says.
    """

    replica: str
    chunks: Sequence[Chunk] = ()
    acknowledgement: Acknowledgement | None = None
    error: PagedLLMError | None = None


@dataclass(frozen=True, kw_only=True)
class News:
    """What a replica tells who follows it."""

    update: KVUpdate
    load: ReplicaLoad
