"""Grammars: what they allow, what is refused, and that nobody waits for one without end."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import llguidance
import pytest
import tokenizers
from tiny_models import CHAT_TEMPLATE

from pagedllm.api import GenerateRequest, Message, StructuredOutput, Tool
from pagedllm.errors import InvalidRequestError
from pagedllm.files.locate import locate_model
from pagedllm.text.answer_grammar import answer_grammar
from pagedllm.text.grammar import Grammar, GrammarCompiler, GrammarError, fill_bitmask
from pagedllm.text.reasoning import Thinking
from pagedllm.text.tokenizer import Tokenizer, load_tokenizer
from pagedllm.text.tool_syntax import HERMES, LLAMA3_JSON, ToolSyntax

ASK = (Message(role="user", content="Hello"),)
ADD = Tool(
    name="add",
    parameters={"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]},
)
NOW = Tool(name="now")


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return load_tokenizer(locate_model("smollm2-135m"))


@pytest.fixture(scope="module")
def tagged(plain: Tokenizer) -> Tokenizer:
    """A vocabulary in which the tags are tokens, as Qwen's."""
    backend = tokenizers.Tokenizer.from_str(plain.to_json())
    tags = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    backend.add_tokens([tokenizers.AddedToken(tag, special=False, normalized=False) for tag in tags])
    return Tokenizer(
        backend, eos_token_ids=plain.eos_token_ids, chat_template=CHAT_TEMPLATE, bos_token="", eos_token=""
    )


@pytest.fixture(scope="module")
def compilers(plain: Tokenizer, tagged: Tokenizer) -> dict[str, tuple[Tokenizer, GrammarCompiler]]:
    return {
        "plain": (plain, GrammarCompiler(plain, plain.vocab_size)),
        "tagged": (tagged, GrammarCompiler(tagged, tagged.vocab_size + 100)),
    }


def compiled(
    parts: tuple[Tokenizer, GrammarCompiler],
    *,
    syntax: ToolSyntax = HERMES,
    thinking: Thinking = Thinking.NONE,
    **request: Any,
) -> Grammar:
    tokenizer, compiler = parts
    written = answer_grammar(
        GenerateRequest(messages=ASK, **request),
        syntax,
        thinking,
        lambda text: tokenizer.added_token_id(text) is not None,
    )
    assert written is not None
    return compiler.compile(written.text, param=written.param)


def takes(tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether a text is allowed from beginning to end. What a mask allows must be; a mask may leave out a token that
    reaches past a lazy rule's end, for its parts lead there as well.
    """
    matcher, executor = grammar.new_matcher(), llguidance.LLExecutor(num_threads=1)
    for token_id in tokenizer.encode(text):
        [row] = fill_bitmask([matcher], executor)
        allowed = bool(row[token_id // 32] >> (token_id % 32) & 1)
        try:
            matcher.accept(token_id)
        except GrammarError:
            assert not allowed
            return False
    return matcher.may_end


@pytest.mark.parametrize(
    ("output", "good", "bad"),
    [
        (
            {"json_schema": True},
            ["{}", '{"a": [1, {"b": null}]}', '{\n  "a": "é"\n}'],
            ["[]", '{"a"}', "3", '{  "a": 1}'],
        ),
        (
            {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
            ['{"a": -3}', '{"a":3}', '{\n    "a": 3\n}'],
            ["{}", '{"a": 1.5}', '{"a": 1, "b": 2}', '{"a":\n\n3}'],
        ),
        (
            {"json_schema": {"type": "object", "additionalProperties": {"type": "integer"}, "properties": {"a": {}}}},
            ['{"a": "x", "b": 2}'],
            ['{"b": "x"}'],
        ),
        ({"json_schema": {"enum": ["日本", "é", 3]}}, ['"日本"', "3"], ['"\\u65e5\\u672c"', '"e"']),
        ({"regex": r"^a/b\/[0-9]{2}$"}, ["a/b/12"], ["a/b/1", "a/b/123", "^a/b/12$"]),
        ({"regex": "a\nb"}, ["a\nb"], ["ab"]),
        ({"choice": ("yes", 'a "b" \\ /', "日本\n")}, ["yes", 'a "b" \\ /', "日本\n"], ["ye", "yes!", "no"]),
        ({"grammar": 'start: "a" B+\nB: /[0-9]/'}, ["a12"], ["a"]),
        ({"grammar": 'root ::= "a" [0-9]+'}, ["a12"], ["a"]),
    ],
)
def test_structures(compilers: Any, output: dict[str, Any], good: list[str], bad: list[str]) -> None:
    tokenizer = compilers["plain"][0]
    grammar = compiled(compilers["plain"], structured_output=StructuredOutput(**output))
    assert {text: takes(tokenizer, grammar, text) for text in (*good, *bad)} == {
        **dict.fromkeys(good, True),
        **dict.fromkeys(bad, False),
    }


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
BARE = '{"name": "add", "parameters": {"a": 1}}'


@pytest.mark.parametrize("vocabulary", ["plain", "tagged"])
@pytest.mark.parametrize(
    ("request_options", "syntax", "good", "bad"),
    [
        (
            {},
            HERMES,
            ["", "Hi <b>", f"Hi\n{CALL}", CALL, f"{CALL}\n{CALL}"],
            [f"{CALL} Bye", CALL[:-3], CALL.replace("1", '"1"'), CALL.replace("add", "sub"), f"a{CALL[:12]}x"],
        ),
        ({"parallel_tool_calls": False}, HERMES, ["Hi", CALL], [f"{CALL}\n{CALL}"]),
        (
            {"tool_choice": "required"},
            HERMES,
            [CALL, CALL.replace('{"a": 1, "b": "é"}', "{}").replace("add", "now")],
            ["Hi", f"Hi {CALL}", f"{CALL}\n{CALL}"],
        ),
        ({"tool_choice": "required", "parallel_tool_calls": True}, HERMES, [CALL, f"{CALL}\n{CALL}"], ["", "Hi"]),
        ({"tool_choice": "now", "parallel_tool_calls": True}, HERMES, [], [CALL, ""]),
        (
            {"structured_output": StructuredOutput(json_schema=True)},
            HERMES,
            ['{"a": 1}', CALL],
            ["Hi", f'{{"a": 1}}{CALL}'],
        ),
        (
            {},
            LLAMA3_JSON,
            ["", "Hi", '{"a": 1}', '{"name', BARE, f"{BARE}; {BARE}", f"Hi {BARE}"],
            [BARE.replace("1", '"1"'), f"{BARE} Bye", '{"name": "sub", "parameters": {}}'],
        ),
        ({"tool_choice": "add"}, LLAMA3_JSON, [BARE], ["", f"{BARE}; {BARE}", '{"a": 1}']),
    ],
)
def test_calls(
    compilers: Any,
    vocabulary: str,
    request_options: dict[str, Any],
    syntax: ToolSyntax,
    good: list[str],
    bad: list[str],
) -> None:
    """Free until a call begins; then, or where one is required, nothing but a call that its tool can take."""
    tokenizer = compilers[vocabulary][0]
    grammar = compiled(compilers[vocabulary], syntax=syntax, tools=(ADD, NOW), **request_options)
    assert {text: takes(tokenizer, grammar, text) for text in (*good, *bad)} == {
        **dict.fromkeys(good, True),
        **dict.fromkeys(bad, False),
    }


@pytest.mark.parametrize("vocabulary", ["plain", "tagged"])
def test_thoughts_come_before_the_structure(compilers: Any, vocabulary: str) -> None:
    """A grammar that forbids thoughts makes a model that was trained to think answer without, or not at all."""
    tokenizer, parts = compilers[vocabulary][0], compilers[vocabulary]
    output = StructuredOutput(json_schema=True)
    possible = compiled(parts, thinking=Thinking.POSSIBLE, structured_output=output)
    begun = compiled(parts, thinking=Thinking.BEGUN, structured_output=output)
    thoughts = 'Is it {"a": 2}?\n</think>\n\n{"a": 1}'
    assert [takes(tokenizer, possible, text) for text in (f"<think>{thoughts}", '{"a": 1}', thoughts)] == [
        True,
        True,
        False,
    ]
    assert [takes(tokenizer, begun, text) for text in (thoughts, '{"a": 1}')] == [True, False]
    called = compiled(parts, thinking=Thinking.BEGUN, tools=(ADD,), tool_choice="required")
    assert takes(tokenizer, called, f"I need <tool_call>\n</think>\n\n{CALL}") or vocabulary == "tagged"
    assert takes(tokenizer, called, f"I need it\n</think>\n\n{CALL}")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "strin"}, "strin"),
    ({"type": "string", "minLength": 5, "maxLength": 2}, "nsatisfiable"),
    ({"$ref": "http://example.com/schema.json"}, "example.com"),
    ({"$ref": "#/$defs/nope"}, "nope"),
    ({"not": {"type": "string"}}, "not"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"type": "integer"}}, "contains"),
    ({"if": {"type": "string"}, "then": {"minLength": 2}}, "if"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around|look-ahead"),
    ({"type": "string", "pattern": "a("}, "unclosed"),
    ({"type": "string", "format": "nosuch"}, "nosuch"),
    ({"enum": []}, "empty"),
    ({"anyOf": []}, "empty"),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "nsatisfiable"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "nsatisfiable"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
    ({"type": "object", "properties": []}, "properties"),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "'a' is unsatisfiable"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible"),
    ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "oneOf"),
    ({"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(3)]} for i in range(14)]}, "too large"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_schemas_that_cannot_be_enforced_are_refused(compilers: Any, number: int) -> None:
    """Enforced in part and without a word, the answer would be taken for what it is not."""
    schema, words = REFUSED[number]
    with pytest.raises(InvalidRequestError, match=words) as caught:
        compiled(compilers["plain"], structured_output=StructuredOutput(json_schema=schema))
    assert caught.value.param == "structured_output"


@pytest.mark.parametrize(
    "output", [{"regex": "a("}, {"regex": "a(?=b)"}, {"grammar": "start: nope"}, {"grammar": "root ::= ("}]
)
def test_bad_expressions_are_refused(compilers: Any, output: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="structured_output: ") as caught:
        compiled(compilers["plain"], structured_output=StructuredOutput(**output))
    assert caught.value.param == "structured_output"


def test_strict_tools_are_enforced_in_full_or_refused(compilers: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    call = '<tool_call>\n{"name": "f", "arguments": {"a": [1, 1]}}\n</tool_call>'
    grammar = compiled(compilers["plain"], tools=(Tool(name="f", parameters=schema),), tool_choice="f")
    assert takes(compilers["plain"][0], grammar, call)
    with pytest.raises(InvalidRequestError, match="uniqueItems") as caught:
        compiled(compilers["plain"], tools=(Tool(name="f", parameters=schema, strict=True),), tool_choice="f")
    assert caught.value.param == "tools"
    with pytest.raises(InvalidRequestError, match="must be an object, not 'string'"):
        compiled(compilers["plain"], tools=(Tool(name="f", parameters={"type": "string"}),))


def test_a_schema_is_closed_only_where_that_shuts_nothing_out(compilers: Any) -> None:
    """Closed branch by branch, a conjunction would have no values left."""
    both = {
        "allOf": [
            {"type": "object", "properties": {"a": {}}, "required": ["a"]},
            {"properties": {"b": {}}, "required": ["b"]},
        ]
    }
    grammar = compiled(compilers["plain"], structured_output=StructuredOutput(json_schema=both))
    assert takes(compilers["plain"][0], grammar, '{"a": 1, "b": 2}')
    values = {"type": "object", "properties": {"a": {"enum": [{"properties": 3}]}}}
    grammar = compiled(compilers["plain"], structured_output=StructuredOutput(json_schema=values))
    assert takes(compilers["plain"][0], grammar, '{"a": {"properties": 3}}')


def test_eos_is_allowed_exactly_where_the_answer_may_end(compilers: Any) -> None:
    """Earlier, it cuts the answer; kept away at the end, the model goes on for ever."""
    tokenizer = compilers["plain"][0]
    matcher = compiled(compilers["plain"], structured_output=StructuredOutput(regex="[0-9]{2,3}")).new_matcher()
    executor = llguidance.LLExecutor(num_threads=1)
    for digit, may_end in zip("123", (False, False, True), strict=True):
        [row] = fill_bitmask([matcher], executor)
        assert {bool(row[eos // 32] >> (eos % 32) & 1) for eos in tokenizer.eos_token_ids} == {may_end}
        matcher.accept(tokenizer.encode(digit)[0])
    assert matcher.is_complete


def test_a_grammar_is_compiled_once_and_the_cache_is_bounded(plain: Tokenizer) -> None:
    compiler = GrammarCompiler(plain, plain.vocab_size)
    texts = [json.dumps({"grammars": [{"lark_grammar": f'start: "{number}"'}]}) for number in range(200)]
    first = compiler.compile(texts[0], param="x")
    assert compiler.compile(texts[0], param="x") is first
    for text in texts:
        compiler.compile(text, param="x")
    assert sum(compiler.find(text) is not None for text in texts) == 128
    assert compiler.find(texts[0]) is None


def test_a_late_grammar_is_refused_at_the_deadline(plain: Tokenizer) -> None:
    """A thread cannot be killed, but nobody waits for it, and no more of them begin than four."""
    compiler = GrammarCompiler(plain, plain.vocab_size, deadline_s=0.05)
    release = threading.Event()
    compiler._get_tables = lambda: release.wait(30)  # type: ignore[assignment, return-value, method-assign]
    for number in range(6):
        start = time.monotonic()
        with pytest.raises(InvalidRequestError, match=r"not compiled within 0\.05 s"):
            compiler.compile(f'start: "{number}"', param="structured_output")
        assert time.monotonic() - start < 10
        assert sum(thread.name == "pagedllm-grammar" for thread in threading.enumerate()) <= 4
    release.set()
