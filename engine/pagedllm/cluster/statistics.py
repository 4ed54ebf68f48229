"""The figures of many engines as those of one."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..api import EngineStats

__all__ = ["combine_stats"]

# Means over what the other field counts; all other figures are sums.
_MEANS = {
    "block_lifetime_s": "num_evictions",
    "block_idle_before_evict_s": "num_evictions",
    "block_reuse_gap_s": "prefix_hits",
}


def combine_stats(parts: Sequence[EngineStats]) -> EngineStats:
    """Sums, and means weighted by what they are means of."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(EngineStats):
        figures = [getattr(part, field.name) for part in parts]
        if field.name == "hint_outcomes":
            counts: Counter[tuple[str, str]] = Counter()
            for part in parts:
                counts.update({(hint, outcome): count for hint, outcome, count in part.hint_outcomes})
            values[field.name] = tuple((*key, count) for key, count in sorted(counts.items()))
        elif field.name in _MEANS:
            weights = [getattr(part, _MEANS[field.name]) for part in parts]
            total = sum(weights)
            pairs = zip(figures, weights, strict=True)
            values[field.name] = sum(figure * weight for figure, weight in pairs) / total if total else 0.0
        else:
            values[field.name] = sum(figures)
    return EngineStats(**values)
