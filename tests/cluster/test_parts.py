"""Parts of the cluster that need no Ray: how many engines, whose options, and the figures of many as those of one."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from pagedllm.api import EngineStats
from pagedllm.cluster.autoscaling import KV_PRESSURE, QUEUE_PRESSURE, replicas_wanted, scale
from pagedllm.cluster.config import ClusterConfig
from pagedllm.cluster.loop_thread import LoopThread
from pagedllm.cluster.statistics import combine_stats
from pagedllm.errors import ConfigError, EngineClosedError

STATS = EngineStats(
    num_running=2,
    num_waiting=1,
    num_running_peak=4,
    num_blocks=100,
    num_free_blocks=50,
    num_cached_blocks=30,
    num_referenced_blocks=20,
    prefix_queries=1000,
    prefix_hits=600,
    num_preemptions=0,
    num_steps=10,
    num_generated_tokens=50,
    hint_outcomes=(("retain", "accepted", 2), ("warm", "accepted", 1)),
    num_evictions=10,
    block_lifetime_s=4.0,
)


def test_replicas_wanted():
    """The target that is missed by most decides; idle engines go; those that say nothing yet count like others."""
    assert replicas_wanted(2, {"a": 2.0, "b": 3.0}, {"a": 0.1, "b": 0.1}) == 5
    assert replicas_wanted(2, {"a": 0.0, "b": 0.0}, {"a": 1.2, "b": 1.2}) == 3
    assert replicas_wanted(4, {"a": 0.1}, {"a": 0.2}) == 1
    assert replicas_wanted(3, {"a": 1.0, "b": 1.0}, {}) == 3
    assert replicas_wanted(3, {}, {}) == 3
    assert replicas_wanted(5, {"a": 0.0}, {"a": 0.0}) == 1


def test_scale_stays_within_bounds():
    context = SimpleNamespace(
        aggregated_metrics={QUEUE_PRESSURE: {"a": 9.0}, KV_PRESSURE: {"a": 0.5}},
        current_num_replicas=2,
        capacity_adjusted_min_replicas=2,
        capacity_adjusted_max_replicas=6,
    )
    assert scale(context) == (6, {})
    context.aggregated_metrics = {QUEUE_PRESSURE: {"a": 0.0}, KV_PRESSURE: {"a": 0.0}}
    assert scale(context) == (2, {})
    context.aggregated_metrics = None
    assert scale(context) == (2, {})


def test_combined_figures_are_sums_and_weighted_means():
    """A mean of means, or a usage that is a sum, would mislead whoever watches the cluster."""
    outcomes = (("warm", "accepted", 5),)
    other = dataclasses.replace(
        STATS, num_evictions=30, block_lifetime_s=8.0, num_referenced_blocks=60, hint_outcomes=outcomes
    )
    both = combine_stats([STATS, other])
    assert both.num_running == 4
    assert both.kv_cache_usage == pytest.approx(0.4)
    assert both.block_lifetime_s == pytest.approx(7.0)
    assert both.hint_outcomes == (("retain", "accepted", 2), ("warm", "accepted", 6))
    assert combine_stats([STATS]) == STATS


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("replicas", 0),
        ("replicas", True),
        ("ingress_replicas", 1.5),
        ("max_replicas", 0),
        ("num_cpus", -1),
        ("num_gpus", float("nan")),
        ("router", "random"),
        ("target_queued_tokens", 0),
        ("target_kv_usage", 1.5),
    ],
)
def test_wrong_options_are_named(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=option):
        ClusterConfig(**{option: value})


def test_max_replicas_is_no_less_than_replicas():
    with pytest.raises(ConfigError, match=r"max_replicas=2: .* at least 3"):
        ClusterConfig(replicas=3, max_replicas=2)
    assert ClusterConfig(replicas=3, max_replicas=4).scales
    assert not ClusterConfig(replicas=3, max_replicas=3).scales


def test_loop_thread_takes_no_context_along():
    """Serve's router takes calls made in one request's context for one call, and never sends the second."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="nothing")
    variable.set("of a request")

    async def look() -> str:
        return variable.get()

    thread = LoopThread("test-loop")
    assert thread.submit(look()).result() == "nothing"
    seen: list[str] = []
    thread.post(lambda: seen.append(variable.get()))
    thread.submit(asyncio.sleep(0)).result()
    assert seen == ["nothing"]
    thread.close()


def test_closed_loop_thread_refuses():
    """Waiting for a thread that has ended would be for ever."""
    thread = LoopThread("test-loop")
    hanging = thread.submit(asyncio.sleep(1000))
    thread.close()
    with pytest.raises((asyncio.CancelledError, Exception)):
        hanging.result(10)
    with pytest.raises(EngineClosedError):
        thread.submit(asyncio.sleep(0))
    thread.post(lambda: None)
