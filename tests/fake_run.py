"""One request inside the fake engine: its whole answer, handed out piece by piece."""

from __future__ import annotations

import dataclasses
import itertools
import time
from dataclasses import dataclass, field

from fake_answers import answers_with_calls, scripted_script
from fake_text import scripted_answer

from pagedllm.api import FinishReason, GenerateRequest, HintOutcome, ToolCallDelta
from pagedllm.text.tool_parsers import CallSplitter, call_id
from pagedllm.text.tool_syntax import HERMES

__all__ = ["Piece", "Run", "hint_outcomes", "plan_answer"]


@dataclass(frozen=True)
class Piece:
    """What one chunk will hold; that of a choice's end also says why it ended."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass
class Run:
    """One request from arrival to its end. The whole answer is known at the start and handed out piece by piece."""

    request: GenerateRequest
    prompt_ids: tuple[int, ...]
    pieces: list[Piece]
    cached_tokens: int
    arrived: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    num_emitted: int = 0
    num_tokens: int = 0
    aborted: bool = False

    @property
    def ended(self) -> bool:
        return self.num_emitted >= len(self.pieces)

    def abort(self) -> None:
        """Let each open choice end next, without what was left of it."""
        self.aborted = True
        done, rest = self.pieces[: self.num_emitted], self.pieces[self.num_emitted :]
        open_choices = [piece.index for piece in rest if piece.finish_reason is not None]
        self.pieces = [*done, *(Piece(index, "", (), "abort") for index in open_choices)]


def plan_answer(
    request: GenerateRequest, prompt_ids: tuple[int, ...], *, chunk_size: int, max_model_len: int
) -> list[Piece]:
    """All pieces of all choices, in turns; the last of each choice has no text."""
    if request.hints.warm:
        return [Piece(0, "", (), "length")]
    plans = []
    for index in range(request.sampling.n):
        text, ids, reason, stop_reason = scripted_answer(
            request.sampling, prompt_ids, max_model_len, index, scripted_script(request)
        )
        starts = range(0, len(text), chunk_size)
        pieces = [Piece(index, text[at : at + chunk_size], ids[at : min(at + chunk_size, len(text))]) for at in starts]
        plan = [*pieces, Piece(index, "", ids[len(text) :], reason, stop_reason)]
        plans.append(_with_calls(plan, request, prompt_ids) if answers_with_calls(request) else plan)
    rounds = itertools.zip_longest(*plans)
    return [piece for turn in rounds for piece in turn if piece is not None]


def _with_calls(plan: list[Piece], request: GenerateRequest, prompt_ids: tuple[int, ...]) -> list[Piece]:
    """The plan with calls parted from the text, as an engine does it."""

    def new_id(number: int) -> str:
        return call_id(request.sampling.seed, prompt_ids, plan[0].index, number)

    splitter = CallSplitter(HERMES, [tool.name for tool in request.tools], new_id)
    parted = []
    for piece in plan:
        split = splitter.append(piece.text, is_last=piece is plan[-1])
        parted.append(dataclasses.replace(piece, text=split.text, tool_calls=split.tool_calls))
    if splitter.has_whole_calls and parted[-1].finish_reason == "stop":
        parted[-1] = dataclasses.replace(parted[-1], finish_reason="tool_calls")
    return parted


def hint_outcomes(run: Run, size: int) -> tuple[HintOutcome, ...]:
    """Retains are kept whole; releases find nothing; priorities are for engines that have a queue."""
    hints = run.request.hints
    num_full = len(run.prompt_ids) // size * size
    kept = [min(num_full, (place.num_tokens or num_full) // size * size) for place in hints.retain]
    outcomes = [HintOutcome(hint="retain", outcome="accepted", num_tokens=count) for count in kept]
    if hints.release:
        outcomes.append(HintOutcome(hint="release", outcome="missing", reason="nothing is pinned"))
    if hints.warm:
        outcomes.append(HintOutcome(hint="warm", outcome="accepted", num_tokens=len(run.prompt_ids)))
    if hints.priority:
        outcomes.append(HintOutcome(hint="priority", outcome="rejected", reason="there is no queue"))
    return tuple(outcomes)
