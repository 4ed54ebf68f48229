"""How many engines there should be: by what waits at them and by how full their KV pools are.

Each replica reports both as a share of what it is meant to have, so that Ray's controller, which runs this, needs no
configuration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["KV_PRESSURE", "QUEUE_PRESSURE", "replicas_wanted", "scale"]

# Names of what each replica reports.
QUEUE_PRESSURE = "queue_pressure"
KV_PRESSURE = "kv_pressure"


def replicas_wanted(num_replicas: int, *pressures: Mapping[Any, float]) -> int:
    """How many replicas would be just within all targets; at least one.

    Args:
        num_replicas: How many there are.
        pressures: For each target what the replicas report, 1 being just within it. Those that do not report yet are
            taken to be as busy as the rest.
    """
    means = [sum(pressure.values()) / len(pressure) for pressure in pressures if pressure]
    if not means:
        return num_replicas
    return max(1, math.ceil(max(means) * num_replicas - 1e-9))


def scale(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray Serve's autoscaling policy: the wanted number of replicas within the deployment's bounds, and no state."""
    figures = context.aggregated_metrics or {}
    wanted = replicas_wanted(
        context.current_num_replicas, figures.get(QUEUE_PRESSURE, {}), figures.get(KV_PRESSURE, {})
    )
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return min(most, max(least, wanted)), {}
