"""Experiments on the real engine: each compares ways to do the same, side by side in one process."""

from __future__ import annotations

from . import batching, chatbot_slo, fragmentation, grammar, parallel_sampling, prefix, pressure, served, tradeoff
from .setting import OpenEngine, Outcome, Scenario, ServeEngine, Setting

__all__ = ["SCENARIOS", "OpenEngine", "Outcome", "Scenario", "ServeEngine", "Setting"]

SCENARIOS: dict[str, Scenario] = {
    module.SCENARIO.name: module.SCENARIO
    for module in (fragmentation, parallel_sampling, batching, prefix, pressure, tradeoff, chatbot_slo, served, grammar)
}
