"""What it costs to hold answers to a grammar: the same batch, with answers that are free and answers that are not."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from statistics import median
from typing import Any

from ...api import GenerateRequest, StructuredOutput
from .setting import Bench, Outcome, Scenario, Setting
from .steps import draw_spread, full_steps_ms

__all__ = ["SCENARIO", "GrammarPlan"]

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "trade": {"enum": ["baker", "smith", "weaver"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "trade", "tags"],
    "additionalProperties": False,
}
# Neither lets an answer end before its last token: a shorter one would leave a smaller batch to compare.
_WAYS: dict[str, StructuredOutput | None] = {
    "free": None,
    "json": StructuredOutput(json_schema={"type": "array", "items": _PERSON, "minItems": 1000}),
    "regex": StructuredOutput(regex=r"([a-z]{1,12} ){1000}"),
}


@dataclass(frozen=True, kw_only=True)
class GrammarPlan:
    """Batches of equal size, in turns.

    Args:
        num_requests: In a batch, all sent at once.
        num_rounds: How often each way is measured.
        input_len: Tokens of each prompt.
        output_len: Tokens generated for each.
    """

    num_requests: int = 8
    num_rounds: int = 6
    input_len: int = 128
    output_len: int = 64


def run(setting: Setting, plan: GrammarPlan) -> Outcome:
    """Compare the steps in which every sequence of the batch computes one token.

    Raises:
        InvalidRequestError: The plan leaves no such step.
    """
    steps_ms: dict[str, list[float]] = {way: [] for way in _WAYS}
    with setting.engine(max_num_seqs=plan.num_requests) as bench:
        _measure(bench, plan)  # the first of each grammar compiles it
        for _ in range(plan.num_rounds):
            for way, durations in _measure(bench, plan).items():
                steps_ms[way] += durations
    result = {f"step_{way}_ms": round(median(durations), 3) for way, durations in steps_ms.items()}
    costs = {
        f"cost_{way}": round(result[f"step_{way}_ms"] / result["step_free_ms"] - 1, 6) for way in _WAYS if way != "free"
    }
    return Outcome(result=result | costs, series=dict(steps_ms))


def _measure(bench: Bench, plan: GrammarPlan) -> dict[str, list[float]]:
    """Durations of the full steps of one batch of each way, in ms; all ways get the same prompts."""
    prompts = [bench.prompts.request(plan.input_len, plan.output_len) for _ in range(plan.num_requests)]
    found = {}
    for way, form in _WAYS.items():
        bench.engine.reset_prefix_cache()
        bench.take_steps()
        bench.ask_together([_with_form(request, form) for request in prompts])
        found[way] = full_steps_ms(bench.take_steps(), plan.num_requests, plan.output_len)
    return found


def _with_form(request: GenerateRequest, form: StructuredOutput | None) -> GenerateRequest:
    sampling = dataclasses.replace(request.sampling, ignore_eos=form is None)
    return dataclasses.replace(request, sampling=sampling, structured_output=form)


def draw(figure: Any, outcome: Outcome) -> None:
    """How the steps' durations are spread, each way."""
    draw_spread(figure, outcome.series, "The same batch, free and held to a grammar")


SCENARIO = Scenario(
    name="grammar",
    plan=GrammarPlan(),
    run=run,
    draw=draw,
    own_options=("max_num_seqs",),
    scaled={"num_rounds": 1},
)
