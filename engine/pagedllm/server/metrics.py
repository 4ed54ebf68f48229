"""Figures for Prometheus, under vLLM's names with our prefix."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..api import Chunk, EngineStats

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "pagedllm:"

_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10)
_LONG_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

# Field of EngineStats -> name, for those that have one of vLLM's; any other field is shown under its own name.
_GAUGES = {
    "num_running": ("num_requests_running", "Requests in the running batch."),
    "num_waiting": ("num_requests_waiting", "Requests that wait to be computed."),
}
_COUNTERS = {
    "prefix_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "num_preemptions": ("num_preemptions", "Sequences that gave their blocks back to be computed again."),
    "num_steps": ("num_steps", "Steps of the engine."),
    "num_generated_tokens": ("engine_generation_tokens", "Tokens that the engine generated, finished or not."),
    "prefix_hits_on_host": ("external_prefix_cache_hits", "Prompt tokens whose KV came back from the host."),
    "num_preemptions_by_swap": ("num_preemptions_by_swap", "Of all preemptions, those whose KV went to the host."),
    "num_preemptions_for_prefill": ("num_preemptions_for_prefill", "Of all preemptions, those for a prompt."),
    "num_swapped_out_blocks": ("num_swapped_out_blocks", "Blocks that went to the host."),
    "num_swapped_in_blocks": ("num_swapped_in_blocks", "Blocks that came back from it."),
    "num_waits_for_prefix": ("num_waits_for_prefix", "Steps that a request let pass for another's prefix."),
    "num_evictions": ("kv_block_evictions", "Cached blocks that made room."),
    "num_refused": ("num_requests_refused", "Requests refused because too many waited."),
    "num_timed_out": ("num_requests_timed_out", "Requests that waited too long."),
}


class Metrics:
    """What the server counts, and what the engine's figures say."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Those of them that came from the prefix cache.")
        self._generation_tokens = self._counter("generation_tokens", "Generated tokens of finished requests.")
        self._success = self._counter("request_success", "Finished requests.", "finished_reason")
        self._rejections = self._counter("admission_rejections", "Calls that were refused or failed.", "reason")
        self._ttft = self._histogram("time_to_first_token_seconds", "Time to first token.", _LONG_S)
        self._itl = self._histogram("inter_token_latency_seconds", "Time between two chunks of a text.", _SHORT_S)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first.", _SHORT_S
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Time from arrival to end.", _LONG_S)
        self._queue = self._histogram("request_queue_time_seconds", "Time until the first step.", _LONG_S)
        self._prefill = self._histogram("request_prefill_time_seconds", "From first step to first token.", _LONG_S)
        self._decode = self._histogram("request_decode_time_seconds", "From first token to end.", _LONG_S)
        self._inference = self._histogram("request_inference_time_seconds", "From first step to end.", _LONG_S)
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were computed, not cached.", _TOKENS
        )
        self._per_step = self._histogram("iteration_tokens_total", "Tokens computed in a step.", _TOKENS)

    def watch(self, stats: Callable[[], EngineStats | None]) -> None:
        """Show also an engine's latest figures, as ``stats`` tells them when it is asked."""
        self.registry.register(_StatsCollector(stats))

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)

    def observe_gap(self, seconds: float) -> None:
        """Time between two chunks of a text."""
        self._itl.observe(seconds)

    def observe_step(self, num_tokens: int) -> None:
        """Tokens of one step; called by the engine's thread."""
        self._per_step.observe(num_tokens)

    def count_rejection(self, reason: str) -> None:
        self._rejections.labels(reason).inc()

    def observe_end(self, last: Chunk) -> None:
        """Book a request by its last chunk."""
        usage, timings = last.usage, last.timings
        assert usage is not None
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._cached_tokens.inc(usage.cached_tokens)
        self._generation_tokens.inc(usage.completion_tokens)
        self._success.labels(last.finish_reason).inc()
        self._computed.observe(usage.prompt_tokens - usage.cached_tokens)
        if timings is None:
            return
        decode_s = max(0.0, timings.total_s - timings.ttft_s)
        self._ttft.observe(timings.ttft_s)
        self._e2e.observe(timings.total_s)
        self._queue.observe(timings.queue_s)
        self._prefill.observe(max(0.0, timings.ttft_s - timings.queue_s))
        self._decode.observe(decode_s)
        self._inference.observe(max(0.0, timings.total_s - timings.queue_s))
        if usage.completion_tokens > 1:
            self._tpot.observe(decode_s / (usage.completion_tokens - 1))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, text, buckets=buckets, registry=self.registry)


class _StatsCollector(Collector):
    """The engine's figures, as they were last seen."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        usage = "Share of the KV pool in use by running sequences, 0 to 1."
        yield GaugeMetricFamily(_PREFIX + "kv_cache_usage_perc", usage, value=stats.kv_cache_usage)
        outcomes = CounterMetricFamily(_PREFIX + "hint_outcomes", "What became of hints.", labels=("hint", "outcome"))
        for hint, outcome, count in stats.hint_outcomes:
            outcomes.add_metric((hint, outcome), count)
        yield outcomes
        for field in dataclasses.fields(stats):
            value = getattr(stats, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            if field.name in _COUNTERS:
                name, text = _COUNTERS[field.name]
                yield CounterMetricFamily(_PREFIX + name, text, value=value)
            else:
                name, text = _GAUGES.get(field.name, (field.name, f"{field.name} of the engine."))
                yield GaugeMetricFamily(_PREFIX + name, text, value=value)
