"""Calls are parted from the text as they come, exactly as they were written and never put right."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedllm.text.tool_parsers import CallSplitter, call_id
from pagedllm.text.tool_syntax import HERMES, LLAMA3_JSON, ToolSyntax

NAMES = ("get_weather", "now")
WEATHER = '{"city": "Łódź \\"a\\" </tool_call> {", "days": [1, {"x": null}]}'


def split(syntax: ToolSyntax, *pieces: str) -> tuple[str, list[tuple[str, str]], bool]:
    """Text, calls as (name, arguments), and whether the last call is whole."""
    splitter = CallSplitter(syntax, NAMES, lambda number: f"id{number}")
    text, calls = "", []
    for number, piece in enumerate(pieces):
        found = splitter.append(piece, is_last=number == len(pieces) - 1)
        text += found.text
        for delta in found.tool_calls:
            if delta.name is not None:
                assert (delta.index, delta.id, delta.arguments) == (len(calls), f"id{len(calls)}", "")
                calls.append((delta.name, ""))
            else:
                assert delta.id is None
                assert delta.index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return text, calls, splitter.has_whole_calls


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CUT = hermes("get_weather", WEATHER).index(WEATHER)
CASES: dict[str, tuple[ToolSyntax, str, tuple[str, list[tuple[str, str]], bool]]] = {
    "a text": (HERMES, " Hello <tool> there \n", (" Hello <tool> there \n", [], False)),
    "one call": (HERMES, hermes("get_weather", WEATHER), ("", [("get_weather", WEATHER)], True)),
    "text before": (HERMES, f"Let me see.\n{hermes('now', '{}')}", ("Let me see.", [("now", "{}")], True)),
    "text between and after": (
        HERMES,
        f"A\n\n{hermes('now', '{}')} and {hermes('get_weather', '{ }')}\nB ",
        ("Aand" + "B ", [("now", "{}"), ("get_weather", "{ }")], True),
    ),
    "white space of its own": (
        HERMES,
        '<tool_call>{ "name" :"now",\n"arguments":\t{"a":1} }</tool_call>\n\n',
        ("", [("now", '{"a":1}')], True),
    ),
    "arguments first": (
        HERMES,
        '<tool_call>{"arguments": {"a": "b"}, "name": "now"}</tool_call>',
        ("", [("now", '{"a": "b"}')], True),
    ),
    "llama's word in tags": (
        HERMES,
        '<tool_call>{"name": "now", "parameters": {}}</tool_call>',
        ("", [("now", "{}")], True),
    ),
    "no arguments": (HERMES, '<tool_call>{"name": "now"}</tool_call>', ("", [("now", "{}")], True)),
    "a name that nobody has": (HERMES, hermes("föö", "{}"), ("", [("föö", "{}")], True)),
    "other fields": (
        HERMES,
        '<tool_call>{"id": [1, "}"], "name": "now", "arguments": {}, "x": 2}</tool_call>',
        ("", [("now", "{}")], True),
    ),
    "no closing tag": (HERMES, '<tool_call>{"name": "now", "arguments": {}}', ("", [("now", "{}")], True)),
    "cut in the arguments": (
        HERMES,
        hermes("get_weather", WEATHER)[: CUT + 16],
        ("", [("get_weather", WEATHER[:16])], False),
    ),
    "cut in the name": (HERMES, 'A\n<tool_call>\n{"name": "get_', ('A<tool_call>\n{"name": "get_', [], False)),
    "cut in the tag": (HERMES, "A\n<tool_c", ("A\n<tool_c", [], False)),
    "no JSON": (HERMES, "<tool_call>\nnow()\n</tool_call>", ("<tool_call>\nnow()\n</tool_call>", [], False)),
    "empty": (HERMES, "<tool_call>{}</tool_call>", ("<tool_call>{}</tool_call>", [], False)),
    "wrong after the arguments": (
        HERMES,
        '<tool_call>{"name": "now", "arguments": {"a": 1}; rm}</tool_call> B',
        ("B", [("now", '{"a": 1}; rm}')], False),
    ),
    "wrong after the call": (
        HERMES,
        '<tool_call>{"name": "now", "arguments": {}} x</tool_call>',
        ("", [("now", "{} x")], False),
    ),
    "arguments as a text": (HERMES, hermes("now", '"{}"'), ("", [("now", '"{}"')], True)),
    "bare call": (
        LLAMA3_JSON,
        f'{{"name": "get_weather", "parameters": {WEATHER}}}',
        ("", [("get_weather", WEATHER)], True),
    ),
    "two bare calls": (
        LLAMA3_JSON,
        '\n{"name": "now", "parameters": {}}; {"name": "get_weather", "parameters": {"a": 1}}\n',
        ("", [("now", "{}"), ("get_weather", '{"a": 1}')], True),
    ),
    "bare text": (
        LLAMA3_JSON,
        ' Hello {"name": "now", "parameters": {}}',
        (' Hello {"name": "now", "parameters": {}}', [], False),
    ),
    "JSON that is no call": (LLAMA3_JSON, '{"name": "Ada", "age": 3}', ('{"name": "Ada", "age": 3}', [], False)),
    "JSON with a tool's name": (LLAMA3_JSON, '{"name": "now", "age": 3}', ('{"name": "now", "age": 3}', [], False)),
    "text after a bare call": (
        LLAMA3_JSON,
        '{"name": "now", "parameters": {}} Bye',
        ("Bye", [("now", "{}")], True),
    ),
    "bare call cut": (LLAMA3_JSON, '{"name": "now", "parameters": {"a"', ("", [("now", '{"a"')], False)),
    "bare call cut early": (LLAMA3_JSON, ' {"name": "no', (' {"name": "no', [], False)),
}


@pytest.mark.parametrize("case", CASES)
def test_calls_and_text(case: str) -> None:
    """Whole, by characters and in two pieces at any place: cut or not, the same comes out."""
    syntax, answer, expected = CASES[case]
    assert split(syntax, answer) == expected
    assert split(syntax, *answer, "") == expected
    for place in range(len(answer)):
        assert split(syntax, answer[:place], answer[place:]) == expected, place


json_values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(
    arguments=st.lists(st.dictionaries(st.text(max_size=5), json_values, max_size=3), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 400), max_size=20),
    indent=st.sampled_from([None, 2]),
    ascii_only=st.booleans(),
    syntax=st.sampled_from([HERMES, LLAMA3_JSON]),
)
def test_arguments_come_out_as_written(
    arguments: list[dict[str, Any]], cuts: list[int], indent: int | None, ascii_only: bool, syntax: ToolSyntax
) -> None:
    """Re-spelled or doubled arguments: other numbers, other escapes, no JSON."""
    texts = [json.dumps(item, indent=indent, ensure_ascii=ascii_only) for item in arguments]
    head = f'{syntax.open_tag}{syntax.call_head}"now", "{syntax.arguments_key}": '
    calls = [f"{head}{text}{syntax.call_tail}{syntax.close_tag}" for text in texts]
    answer = syntax.separator.join(calls)
    places = sorted({0, len(answer), *(cut for cut in cuts if cut < len(answer))})
    pieces = [answer[start:end] for start, end in itertools.pairwise(places)]
    assert split(syntax, *pieces) == ("", [("now", text) for text in texts], True)


@given(
    pieces=st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "now"', ', "arguments": ', "{", "}", '"', " ", "x"])
    )
)
def test_nothing_but_space_and_marks_is_lost(pieces: list[str]) -> None:
    """Whatever a model writes, what it says is there: as text, name or arguments."""
    answer = "".join(pieces)
    text, calls, _ = split(HERMES, *pieces, "")
    out = text + "".join(f"{name}{arguments}" for name, arguments in calls)
    assert out.count("x") == answer.count("x") or calls
    if not calls:
        assert re.sub(r"\s", "", out) == re.sub(r"\s", "", answer)
    assert split(HERMES, answer) == split(HERMES, *pieces, "")


def test_ids_are_what_the_strictest_template_takes() -> None:
    """Mistral's templates refuse any id but nine letters and digits; two calls with one id are one call's answers."""
    ids = {call_id(seed, index, number) for seed in range(10) for index in range(3) for number in range(5)}
    assert len(ids) == 150
    assert all(re.fullmatch(r"[A-Za-z0-9]{9}", item) for item in ids)
    assert call_id(1, 2, (3, 4)) == call_id(1, 2, (3, 4))
