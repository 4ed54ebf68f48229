"""How replicas are run: one frozen, validated value beside the engine's and the server's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

__all__ = ["ROUTERS", "ClusterConfig"]

ROUTERS = ("prefix", "power_of_two")


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Replicas of one engine behind one URL.

    Args:
        replicas: Engines, each with weights and KV pool of its own; the fewest where there may be more.
        max_replicas: Most engines: they are added and removed by queue and KV use. None: always ``replicas``.
        ingress_replicas: Processes that parse requests and decide where they go.
        num_cpus: CPUs that each engine takes of its machine, and threads that it computes with.
        num_gpus: GPUs that each engine takes.
        router: ``"prefix"``, by what replicas have cached and have to do; ``"power_of_two"``, the less busy of two at
            random, which is what Ray Serve does by default.
        target_queued_tokens: Prompt tokens waiting at each engine above which more engines are started.
        target_kv_usage: Share of the KV pools in use above which more engines are started, 0 to 1.

    Raises:
        ConfigError: Naming the option, its value and what is allowed.
    """

    replicas: int = 1
    max_replicas: int | None = None
    ingress_replicas: int = 1
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    router: str = "prefix"
    target_queued_tokens: int = 4096
    target_kv_usage: float = 0.8

    def __post_init__(self) -> None:
        for option in ("replicas", "ingress_replicas", "target_queued_tokens"):
            _check_whole(option, getattr(self, option), minimum=1)
        if self.max_replicas is not None:
            _check_whole("max_replicas", self.max_replicas, minimum=self.replicas)
        for option in ("num_cpus", "num_gpus"):
            value = getattr(self, option)
            if not _is_number(value) or value < 0:
                raise ConfigError.for_value(option, value, "must be a number of at least 0")
        if self.router not in ROUTERS:
            raise ConfigError.for_value("router", self.router, f"must be one of {', '.join(ROUTERS)}")
        if not _is_number(self.target_kv_usage) or not 0 < self.target_kv_usage <= 1:
            raise ConfigError.for_value("target_kv_usage", self.target_kv_usage, "must be above 0 and at most 1")

    @property
    def scales(self) -> bool:
        """Whether the number of engines follows the load."""
        return self.max_replicas is not None and self.max_replicas > self.replicas


def _check_whole(option: str, value: Any, *, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError.for_value(option, value, f"must be a whole number of at least {minimum}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
