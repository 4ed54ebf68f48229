"""Stop strings: cut exactly, never shown in part, whatever the tokens are."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from pagedllm.text.output_processor import OutputText


class LetterTokenizer:
    """Token i is the text ``pieces[i]``."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(self.pieces[token_id] for token_id in ids)

    def has_text(self, token_id: int) -> bool:
        return True

    def is_byte(self, token_id: int) -> bool:
        return False


def stream(pieces: Sequence[str], stop: tuple[str, ...]) -> tuple[list[str], str | None]:
    """Deltas of a text that comes in pieces, and the stop string that ended it."""
    output = OutputText(LetterTokenizer(pieces), stop)  # type: ignore[arg-type]
    deltas = []
    for i in range(len(pieces)):
        delta = output.append([i], is_last=i == len(pieces) - 1)
        deltas.append(delta.text)
        if delta.stop is not None:
            return deltas, delta.stop
    return deltas, None


def test_a_stop_string_split_over_tokens_never_shows():
    """Public case P2: DEF, GH, I, J must not leak DEF before J completes the stop."""
    deltas, stop = stream(["ABC ", "DEF", "GH", "I", "J", "K"], ("DEFGHIJ",))
    assert deltas == ["ABC ", "", "", "", ""]
    assert stop == "DEFGHIJ"


def test_a_stop_inside_a_token_is_cut_exactly():
    assert stream(["do", "lor sit"], ("lo",)) == (["do", ""], "lo")


def test_what_turns_out_not_to_be_a_stop_is_given_out():
    assert stream(["xa", "ab", "c"], ("aac",)) == (["x", "aab", "c"], None)
    assert stream(["xa", "ac"], ("aac",)) == (["x", ""], "aac")


def test_a_held_tail_is_given_out_at_the_end():
    assert stream(["ab", "DE"], ("DEF",)) == (["ab", "DE"], None)


def test_stops_are_literal():
    """As a regular expression '.' would match anything."""
    assert stream(["abc"], (".",)) == (["abc"], None)
    assert stream(["a.c"], (".",)) == (["a"], ".")


def test_the_stop_that_completes_first_wins():
    assert stream(["xabc"], ("abc", "b")) == (["xa"], "b")
    assert stream(["xabc"], ("bc", "abc")) == (["x"], "abc")


@given(
    pieces=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple),
)
def test_pieces_never_change_the_text(pieces: list[str], stop: tuple[str, ...]):
    deltas, which = stream(pieces, stop)
    one_by_one, which_alone = stream(list("".join(pieces)), stop)
    text = "".join(deltas)
    assert (text, which) == ("".join(one_by_one), which_alone)
    whole = "".join(pieces)
    assert whole.startswith(text)
    assert not any(item in text for item in stop)
    if which is None:
        assert text == whole
    else:
        assert whole[len(text) :].startswith(which)
