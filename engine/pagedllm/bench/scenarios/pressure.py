"""A pool far too small, with the three ways to preempt: the texts of a roomy run, at what price."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...api import EngineStats, GenerateRequest, RequestOutput
from ...errors import InvalidRequestError, PagedLLMError
from .setting import Bench, Outcome, Scenario, Setting, make_request

__all__ = ["SCENARIO", "PressurePlan", "texts_agree"]

_MODES = ("swap", "recompute", "auto")
_DEFAULT_SWAP_GIB = 0.5
# Two sums in another order may choose another token where the two best are as near as this.
_NEAR_TIE = 1e-4


@dataclass(frozen=True, kw_only=True)
class PressurePlan:
    """Requests that together want several times the pool.

    Args:
        num_requests: All sent at once.
        min_input_len, max_input_len: Tokens of the prompts, evenly spaced.
        output_len: Tokens of each answer.
        num_blocks: Of the small pool.
    """

    num_requests: int = 24
    min_input_len: int = 60
    max_input_len: int = 200
    output_len: int = 80
    num_blocks: int = 60


def run(setting: Setting, plan: PressurePlan) -> Outcome:
    """Generate the same texts in a roomy pool and in the small one, once for each way to preempt.

    In float32 unless ``dtype`` says otherwise: in bfloat16 a text may go another way in other company.
    """
    dtype = "float32" if setting.config.dtype == "auto" else setting.config.dtype
    with setting.engine(dtype=dtype) as bench:
        requests = _requests(bench, plan)
        scored, roomy = _generate(bench, [_with_logprobs(item) for item in requests])
        block_bytes = bench.info.kv_bytes_per_token * bench.info.block_size
        if bench.engine.stats().num_preemptions:
            raise InvalidRequestError.for_value(
                "num_requests", plan.num_requests, "do not fit even the pool that was to be roomy"
            )
    result: dict[str, Any] = {"texts_equal": True, "num_near_ties": 0, "preemptions": 0, "swapped_in_blocks": 0}
    result |= {"num_blocks": plan.num_blocks, "dtype": dtype}
    result |= {f"roomy_{name}": value for name, value in roomy.items()}
    for mode in _MODES:
        swap_space = 0.0 if mode == "recompute" else setting.config.swap_space or _DEFAULT_SWAP_GIB
        pool = {"kv_cache_memory_bytes": plan.num_blocks * block_bytes, "max_model_len": _longest(plan)}
        with setting.engine(dtype=dtype, preemption_mode=mode, swap_space=swap_space, **pool) as bench:
            before = bench.engine.stats()
            outputs, course = _generate(bench, _requests(bench, plan))
            found = course | _changes(before, bench.engine.stats())
        equal, num_near_ties = texts_agree(scored, outputs)
        result["texts_equal"] = result["texts_equal"] and equal
        result["num_near_ties"] += num_near_ties
        result["preemptions"] += found["preemptions"]
        result["swapped_in_blocks"] += found["swapped_in_blocks"]
        result |= {f"{mode}_{name}": value for name, value in {"texts_equal": equal, **found}.items()}
    return Outcome(result=result)


def texts_agree(roomy: Sequence[RequestOutput], tight: Sequence[RequestOutput]) -> tuple[bool, int]:
    """Whether answers are the same, token by token, and how many were excused.

    Excused is a text from its first difference on, if the log probabilities of the roomy run's two best tokens there
    differ by less than 1e-4: floating point sums do not have the same last bits in every batch.

    Args:
        roomy: With log probabilities of the two best tokens.
        tight: The same requests, in the same order.
    """
    num_near_ties = 0
    for expected, found in zip(roomy, tight, strict=True):
        (left,), (right,) = expected.choices, found.choices
        if left.token_ids == right.token_ids:
            continue
        if len(left.token_ids) != len(right.token_ids) or left.logprobs is None:
            return False, num_near_ties
        pairs = zip(left.token_ids, right.token_ids, strict=True)
        place = next(index for index, (one, other) in enumerate(pairs) if one != other)
        best, second = left.logprobs[place].top[:2]
        if best.logprob - second.logprob >= _NEAR_TIE:
            return False, num_near_ties
        num_near_ties += 1
    return True, num_near_ties


def _requests(bench: Bench, plan: PressurePlan) -> list[GenerateRequest]:
    step = (plan.max_input_len - plan.min_input_len) / max(plan.num_requests - 1, 1)
    return [
        bench.prompts.request(plan.min_input_len + round(index * step), plan.output_len)
        for index in range(plan.num_requests)
    ]


def _with_logprobs(request: GenerateRequest) -> GenerateRequest:
    assert isinstance(request.prompt, tuple)
    assert request.sampling.max_tokens is not None
    return make_request(request.prompt, request.sampling.max_tokens, logprobs=2)


def _longest(plan: PressurePlan) -> int:
    return plan.max_input_len + plan.output_len


def _generate(bench: Bench, requests: list[GenerateRequest]) -> tuple[list[RequestOutput], dict[str, Any]]:
    bench.take_steps()
    start = time.monotonic()
    outputs = []
    for output in bench.engine.generate(requests):
        if isinstance(output, PagedLLMError):
            raise output
        outputs.append(output)
    duration = time.monotonic() - start
    return outputs, {"steps": len(bench.take_steps()), "duration_s": round(duration, 3)}


def _changes(before: EngineStats, after: EngineStats) -> dict[str, int]:
    return {
        "preemptions": after.num_preemptions - before.num_preemptions,
        "preemptions_by_swap": after.num_preemptions_by_swap - before.num_preemptions_by_swap,
        "swapped_out_blocks": after.num_swapped_out_blocks - before.num_swapped_out_blocks,
        "swapped_in_blocks": after.num_swapped_in_blocks - before.num_swapped_in_blocks,
    }


def draw(figure: Any, outcome: Outcome) -> None:
    """Preemptions, copied blocks and time by way to preempt."""
    result = outcome.result
    panels = (("preemptions", "preemptions"), ("swapped_in_blocks", "blocks copied back"), ("duration_s", "seconds"))
    for axes, (name, title) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        labels, values = list(_MODES), [result[f"{mode}_{name}"] for mode in _MODES]
        if name == "duration_s":
            labels, values = ["roomy", *labels], [result["roomy_duration_s"], *values]
        axes.bar_label(axes.bar(labels, values, color="tab:blue"), fmt="{:.4g}", padding=2)
        axes.set_title(title)
        axes.margins(y=0.12)
        axes.tick_params(axis="x", labelsize=9)
    verdict = "the same texts as in a roomy pool" if result["texts_equal"] else "OTHER TEXTS than in a roomy pool"
    figure.suptitle(f"A pool of {result['num_blocks']} blocks: {verdict}")


SCENARIO = Scenario(
    name="pressure",
    plan=PressurePlan(),
    run=run,
    draw=draw,
    own_options=("preemption_mode", "kv_cache_memory_bytes", "max_model_len"),
    scaled={"num_requests": 8},
)
