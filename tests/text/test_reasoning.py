"""Thoughts are parted from the answer as they come, at the tags and nowhere else."""

from __future__ import annotations

import pytest

from pagedllm.text.reasoning import Thinking, ThoughtSplitter

CASES: dict[str, tuple[Thinking, str, tuple[str, str]]] = {
    "none": (Thinking.NONE, " a <think>b</think> ", ("", " a <think>b</think> ")),
    "begun": (Thinking.BEGUN, "\nI see.\n\n</think>\n\nYes. ", ("I see.", "Yes. ")),
    "opened": (Thinking.POSSIBLE, "<think>\nI see.\n</think>\n\nYes.", ("I see.", "Yes.")),
    "opened after space": (Thinking.POSSIBLE, "\n <think>a</think>b", ("a", "b")),
    "no thoughts": (Thinking.POSSIBLE, "\n Yes <think>b</think>", ("", "\n Yes <think>b</think>")),
    "empty thoughts": (Thinking.POSSIBLE, "<think>\n\n</think>\n\nYes", ("", "Yes")),
    "cut thoughts": (Thinking.BEGUN, "I see \n</thi", ("I see \n</thi", "")),
    "thoughts that never end": (Thinking.POSSIBLE, "<think>I see \n", ("I see", "")),
    "cut in the tag": (Thinking.POSSIBLE, "<thi", ("", "<thi")),
    "tags in the answer": (Thinking.BEGUN, "a</think>b</think><think>c", ("a", "b</think><think>c")),
    "other tags": (Thinking.BEGUN, "a < b </b> </think>c", ("a < b </b>", "c")),
    "nothing": (Thinking.POSSIBLE, "", ("", "")),
}


@pytest.mark.parametrize("case", CASES)
def test_thoughts_and_answer(case: str) -> None:
    """By characters and in two pieces at any place: the same comes out."""
    thinking, answer, expected = CASES[case]

    def split(*pieces: str) -> tuple[str, str]:
        splitter = ThoughtSplitter(thinking)
        parts = [splitter.append(piece, is_last=number == len(pieces) - 1) for number, piece in enumerate(pieces)]
        return "".join(thought for thought, _ in parts), "".join(text for _, text in parts)

    assert split(answer) == expected
    assert split(*answer, "") == expected
    for place in range(len(answer)):
        assert split(answer[:place], answer[place:]) == expected, place
