"""How many inputs of a batch are under way at once."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list

__all__ = ["with_max_concurrency"]


def with_max_concurrency(
    config: RunnableConfig | Sequence[RunnableConfig] | None, num_inputs: int, most: int
) -> list[RunnableConfig]:
    """One config per input, with ``max_concurrency`` set: the caller's, else all inputs at once up to ``most``."""
    configs = get_config_list(config, num_inputs)
    if configs and configs[0].get("max_concurrency") is None:
        for each in configs:
            each["max_concurrency"] = min(num_inputs, most)
    return configs
