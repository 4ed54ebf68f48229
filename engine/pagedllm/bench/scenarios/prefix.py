"""A shared prefix: time to the first token with the cache and without, and what a pin keeps through a flood."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

from ...api import CacheHints, Retain
from ...errors import InvalidRequestError
from .setting import Bench, Outcome, Scenario, Setting, make_request

__all__ = ["SCENARIO", "PrefixPlan"]

_KEY = "pinned"
_LONG_TTL_S, _SHORT_TTL_S = 3600.0, 0.5


@dataclass(frozen=True, kw_only=True)
class PrefixPlan:
    """Questions about the same documents, and then a flood of other prompts.

    Args:
        shared_len: Tokens that all questions begin with: a system prompt and documents.
        question_len: Tokens of each question after them.
        output_len: Tokens of an answer.
        num_requests: Questions, one after the other.
        pinned_len: Tokens of the prefix that is pinned before the flood.
        unpinned_len: Tokens of one that is not.
        num_flood: Prompts of the flood.
        flood_len: Tokens of each.
    """

    shared_len: int = 1000
    question_len: int = 30
    output_len: int = 4
    num_requests: int = 12
    pinned_len: int = 2000
    unpinned_len: int = 1000
    num_flood: int = 50
    flood_len: int = 120


def run(setting: Setting, plan: PrefixPlan) -> Outcome:
    """Ask one question after the other, with the prefix cache off and then on, and then flood a small pool.

    Cold is the median with the cache off. Warm is the median with it on, without the first question, which fills it.
    """
    with setting.engine(enable_prefix_caching=False) as bench:
        cold, _ = _ask_questions(bench, plan)
    with setting.engine() as bench:
        warm, num_cached_tokens = _ask_questions(bench, plan)
        block_bytes = bench.info.kv_bytes_per_token * bench.info.block_size
        pinned = _survive_flood(setting, plan, block_bytes=block_bytes, block_size=bench.info.block_size)
    result: dict[str, Any] = {
        "ttft_cold_ms": round(1000 * median(cold), 3),
        "ttft_warm_ms": round(1000 * median(warm[1:]), 3),
        "ttft_ratio": round(median(warm[1:]) / median(cold), 6),
        "ttft_first_ms": round(1000 * warm[0], 3),
        "shared_tokens": plan.shared_len,
        "cached_tokens": num_cached_tokens,
        **pinned,
    }
    in_ms = {"cold_ms": [1000 * value for value in cold], "warm_ms": [1000 * value for value in warm]}
    return Outcome(result=result, series=in_ms)


def _ask_questions(bench: Bench, plan: PrefixPlan) -> tuple[list[float], int]:
    """Seconds to the first token of each, and the cached tokens of the last."""
    if plan.num_requests < 2:
        raise InvalidRequestError.for_value("num_requests", plan.num_requests, "must be at least 2: the first is cold")
    shared = bench.prompts.draw(plan.shared_len)
    answers = []
    for _ in range(plan.num_requests):
        request = bench.prompts.request(plan.question_len, plan.output_len, prefix=shared)
        answers += bench.ask_together([request])
    return [answer.ttft_s for answer in answers], answers[-1].num_cached_tokens


def _survive_flood(setting: Setting, plan: PrefixPlan, *, block_bytes: int, block_size: int) -> dict[str, Any]:
    """Pin one prefix, cache another, and send other prompts through a pool that cannot keep them all."""
    # Pins may hold half of the pool by default; the flood is longer than the rest.
    num_blocks = -(-(2 * plan.pinned_len + plan.flood_len) // block_size) + 2
    max_model_len = max(plan.pinned_len, plan.unpinned_len, plan.flood_len) + block_size
    with setting.engine(kv_cache_memory_bytes=num_blocks * block_bytes, max_model_len=max_model_len) as bench:
        engine, prompts = bench.engine, bench.prompts
        pinned, unpinned = prompts.draw(plan.pinned_len), prompts.draw(plan.unpinned_len)
        # One token more, because the last token of a prompt is always computed.
        ask_pinned, ask_unpinned = make_request((*pinned, 5), 1), make_request((*unpinned, 5), 1)
        (outcome,) = engine.warm(_pinning(pinned, _LONG_TTL_S)).hints[:1]
        engine.warm(make_request(unpinned, 1))
        result: dict[str, Any] = {
            "pinned_tokens": outcome.num_tokens,
            "unpinned_tokens": engine.match_prefix(ask_unpinned),
        }
        _flood(bench, plan)
        result["pinned_tokens_after_flood"] = engine.match_prefix(ask_pinned)
        result["unpinned_tokens_after_flood"] = engine.match_prefix(ask_unpinned)
        # A pin is not shortened by a shorter one, so it is made anew.
        engine.warm(make_request(pinned, 1, hints=CacheHints(release=True, prefix_key=_KEY)))
        engine.warm(_pinning(pinned, _SHORT_TTL_S))
        time.sleep(2 * _SHORT_TTL_S)
        _flood(bench, plan)
        result["pinned_tokens_after_ttl"] = engine.match_prefix(ask_pinned)
        return result | {"num_flood": plan.num_flood, "flood_pool_blocks": bench.info.num_blocks}


def _pinning(prompt: tuple[int, ...], ttl_s: float) -> Any:
    hints = CacheHints(retain=(Retain(ttl_s=ttl_s),), prefix_key=_KEY)
    return make_request(prompt, 1, hints=hints)


def _flood(bench: Bench, plan: PrefixPlan) -> None:
    for _ in range(plan.num_flood):
        bench.ask_together([bench.prompts.request(plan.flood_len, 1)])


def draw(figure: Any, outcome: Outcome) -> None:
    """Time to the first token, question by question; tokens still cached after the flood."""
    times, kept = figure.subplots(1, 2, width_ratios=(3, 2))
    result, series = outcome.result, outcome.series
    questions = range(1, len(series["cold_ms"]) + 1)
    cold = f"cache off: median {result['ttft_cold_ms']:.0f} ms"
    warm = f"cache on: median {result['ttft_warm_ms']:.0f} ms after the first"
    times.plot(questions, series["cold_ms"], marker="o", color="tab:red", label=cold)
    times.plot(questions, series["warm_ms"], marker="o", color="tab:blue", label=warm)
    times.set_xticks(questions)
    times.set(xlabel="question", ylabel="time to first token (ms)", ylim=(0, None))
    times.set_title(f"{result['shared_tokens']} tokens shared by all questions")
    times.legend(loc="center right")
    labels = ("pinned", "pinned,\nflooded", "not pinned,\nflooded", "TTL over,\nflooded")
    names = ("pinned_tokens", "pinned_tokens_after_flood", "unpinned_tokens_after_flood", "pinned_tokens_after_ttl")
    colors = ("tab:gray", "tab:blue", "tab:red", "tab:orange")
    drawn = kept.bar(labels, [result[name] for name in names], color=colors)
    kept.bar_label(drawn, padding=2)
    kept.set(ylabel="tokens of the prefix in the cache", title=f"A flood of {result['num_flood']} other prompts")
    kept.tick_params(axis="x", labelsize=8)
    kept.margins(y=0.15)


SCENARIO = Scenario(
    name="prefix",
    plan=PrefixPlan(),
    run=run,
    draw=draw,
    own_options=("enable_prefix_caching", "kv_cache_memory_bytes"),
    scaled={"num_requests": 2},
)
