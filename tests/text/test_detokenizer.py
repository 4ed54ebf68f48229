"""Streamed text is the whole text, in whole characters, whatever the ids."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import train_tokenizer
from tokenizers import decoders, models

from pagedllm.files.locate import locate_model
from pagedllm.text.detokenizer import _LIMIT, IncrementalDetokenizer
from pagedllm.text.tokenizer import Tokenizer, load_tokenizer

REPLACEMENT = "\ufffd"


def wrap(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(backend, eos_token_ids=frozenset(), chat_template=None, bos_token="", eos_token="")


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(locate_model("smollm2-135m"))


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """One token for each of the 256 bytes, so that random ids are random bytes."""
    return wrap(train_tokenizer(vocab_size=259))


@pytest.fixture(scope="module")
def straddling() -> Tokenizer:
    """Tokens that end one character and begin the next: 你 is E4 BD A0."""
    alphabet = byte_alphabet()
    pieces = [b"\xe4", b"\xbd\xa0\xe4", b"\xa0\xe4\xbd", b"\xbd", b"\xa0", b"a\xe4\xbd", b"\xf0\x9f\x98", b"\xff"]
    vocab = {"".join(alphabet[byte] for byte in piece): i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return wrap(backend)


def byte_alphabet() -> dict[int, str]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """Llama 2's decoder: spaces as ▁, byte fallback, and one leading space stripped."""
    words = ["<unk>", "▁", "▁▁", "▁the", "cat", "你", "▁<0x", "\ufffd", "."]
    tokens = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.add_special_tokens(["<unk>"])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrap(backend)


def check_law(tokenizer: Tokenizer, steps: list[list[int]]) -> list[str]:
    """Stream, check the law, and return the deltas (the flushed rest last)."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    deltas = []
    for step in steps:
        deltas.append(detokenizer.append(step))
        window = detokenizer._window
        # It must not grow with the sequence, except while SentencePiece bytes wait for their run's end.
        assert len(window) <= _LIMIT or tokenizer.is_byte(window[-1])
    deltas.append(detokenizer.flush())
    assert detokenizer.flush() == ""
    whole = tokenizer.decode([token_id for step in steps for token_id in step])
    assert "".join(deltas) == whole
    return deltas


def steps_of(ids: st.SearchStrategy[int], max_size: int = 60) -> st.SearchStrategy[list[list[int]]]:
    """One to three tokens at a time, as speculative decoding would give them."""
    return st.lists(st.lists(ids, max_size=3), max_size=max_size)


@pytest.mark.model
@settings(max_examples=300, deadline=None)
@given(steps=steps_of(st.integers(0, 49_151 + 5)))
def test_law_for_any_ids_of_the_embedded_vocabulary(smollm2: Tokenizer, steps: list[list[int]]) -> None:
    """Special tokens, padding ids beyond the vocabulary and broken bytes included."""
    check_law(smollm2, steps)


@pytest.mark.model
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60), cut=st.integers(0, 8))
def test_law_for_texts_cut_anywhere(smollm2: Tokenizer, text: str, cut: int) -> None:
    """max_tokens may end a text inside a character."""
    ids = smollm2.encode(text)[: -cut or None]
    check_law(smollm2, [[token_id] for token_id in ids])


@settings(max_examples=300, deadline=None)
@given(steps=steps_of(st.integers(0, 258)))
def test_law_for_any_bytes(byte_level: Tokenizer, steps: list[list[int]]) -> None:
    """Every way in which bytes can fail to be UTF-8."""
    check_law(byte_level, steps)


@pytest.mark.parametrize("num_before", range(2 * _LIMIT))
def test_window_may_be_cut_inside_a_character(byte_level: Tokenizer, num_before: int) -> None:
    """A cut that loses the first byte of an unfinished character turns it into U+FFFD."""
    deltas = check_law(byte_level, [[token_id] for token_id in byte_level.encode("a" * num_before + "😀你é.")])
    assert [delta for delta in deltas if delta] == [*"a" * num_before, "😀", "你", "é", "."]


@settings(max_examples=300, deadline=None)
@given(steps=steps_of(st.integers(0, 7)))
def test_law_for_tokens_that_straddle_characters(straddling: Tokenizer, steps: list[list[int]]) -> None:
    """No token boundary is a character boundary, so there is never a clean place to cut the window."""
    check_law(straddling, steps)


def test_straddling_tokens_stream_and_stay_bounded(straddling: Tokenizer) -> None:
    """Such a text must flow, one character behind, not wait for a clean boundary that never comes."""
    deltas = check_law(straddling, [[0], *([1] for _ in range(100))])
    assert deltas == ["", *("你" for _ in range(100)), REPLACEMENT]


def test_undecodable_run_streams_and_stays_bounded(straddling: Tokenizer) -> None:
    """A long run of stray bytes is emitted one behind: an earlier U+FFFD can no longer change."""
    deltas = check_law(straddling, [[7] for _ in range(100)])
    assert deltas == ["", *(REPLACEMENT for _ in range(99)), REPLACEMENT]


@settings(max_examples=300, deadline=None)
@given(steps=steps_of(st.integers(0, 264) | st.sampled_from([1, 2, 3, 4, 9 + 0xE4, 9 + 0xBD, 9 + 0xA0])))
def test_law_for_sentencepiece(sentencepiece: Tokenizer, steps: list[list[int]]) -> None:
    """The leading space is stripped once, at the start only; one bad byte spoils its whole run."""
    check_law(sentencepiece, steps)


def test_sentencepiece_bytes_wait_for_the_end_of_their_run(sentencepiece: Tokenizer) -> None:
    """After E4 BD A0 the text is 你, but one more byte FF makes it four U+FFFD."""
    first_byte = 9
    good = [[first_byte + byte] for byte in "你".encode()]
    assert check_law(sentencepiece, [[4], *good, [4]]) == ["cat", "", "", "", "你cat", ""]
    assert check_law(sentencepiece, [[4], *good, [first_byte + 0xFF]]) == ["cat", "", "", "", "", REPLACEMENT * 4]


@pytest.mark.model
@pytest.mark.parametrize("text", ["😀", "a😀b", "Zażółć gęślą jaźń", "你好 world", "    .", " leading", "👩‍👩‍👧!"])
def test_deltas_hold_whole_characters(smollm2: Tokenizer, text: str) -> None:
    """Decoding each token alone shows U+FFFD, eats leading spaces or drops punctuation after spaces."""
    deltas = check_law(smollm2, [[token_id] for token_id in smollm2.encode(text)])
    assert not any(REPLACEMENT in delta for delta in deltas)
    assert deltas[-1] == ""


@pytest.mark.model
def test_cut_emoji_is_flushed_once(smollm2: Tokenizer) -> None:
    """What can no longer become a character shows as one U+FFFD at the end."""
    ids = smollm2.encode("hi 😀")[:-1]
    deltas = check_law(smollm2, [[token_id] for token_id in ids])
    assert deltas[-1] == REPLACEMENT
    assert not any(REPLACEMENT in delta for delta in deltas[:-1])


@pytest.mark.model
def test_special_tokens_inside_a_character_do_not_part_it(smollm2: Tokenizer) -> None:
    """They have no text, however many come."""
    first, *rest = smollm2.encode("😀")
    deltas = check_law(smollm2, [[first], *([0] for _ in range(50)), rest])
    assert deltas == ["", *("" for _ in range(50)), "😀", ""]
