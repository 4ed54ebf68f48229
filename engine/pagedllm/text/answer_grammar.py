"""The grammar of a whole answer: thoughts, calls and text, in the notation that llguidance takes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from ..api import GenerateRequest, StructuredOutput, Tool
from ..errors import InvalidRequestError
from .guidance import load_gbnf_reader
from .json_schema import arguments_schema, json_rule
from .reasoning import CLOSE_TAG, OPEN_TAG, Thinking
from .tool_syntax import ToolSyntax

__all__ = ["AnswerGrammar", "answer_grammar"]

_LEADING_SPACE = r"SPACE: /[ \n]{0,4}/"


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """A grammar to compile.

    Args:
        text: llguidance's JSON.
        param: The field of the request that it comes from.
    """

    text: str
    param: str


def answer_grammar(
    request: GenerateRequest, syntax: ToolSyntax, thinking: Thinking, is_token: Callable[[str], bool]
) -> AnswerGrammar | None:
    """What a request's answer must be; None if it may be any text.

    Args:
        request: With tools, if its answer may call them, and a structure, if it must have one.
        syntax: How calls are written.
        thinking: Whether thoughts come before the answer.
        is_token: Whether a text is an added token of the model, which a grammar names instead of spelling it.

    Raises:
        InvalidRequestError: Naming what cannot be enforced.
    """
    structured = request.structured_output
    if structured is None and not request.calls_tools:
        return None
    rules = _Rules(is_token)
    if structured is not None:
        rules.add_structure(structured)
    if request.calls_tools:
        rules.add_calls(request, syntax)
    body = _body(request, syntax, rules)
    start = f"thoughts SPACE ({body})" if thinking is Thinking.BEGUN else body
    if thinking is Thinking.POSSIBLE:
        start = f"{body} | {rules.tag(OPEN_TAG)} thoughts SPACE ({body})"
    if thinking is not Thinking.NONE:
        rules.add_thoughts()
    text = rules.finish(start)
    return AnswerGrammar(text, "tools" if structured is None else "structured_output")


def _body(request: GenerateRequest, syntax: ToolSyntax, rules: _Rules) -> str:
    """What comes after the thoughts."""
    if not request.calls_tools:
        return "answer"
    is_named = request.must_call and request.tool_choice != "required"
    allows_more = not is_named and (request.parallel_tool_calls or not request.must_call)
    if request.parallel_tool_calls is False:
        allows_more = False
    more = f"({_literal(syntax.separator)} {rules.opening(syntax)} call)*" if allows_more else ""
    calls = f"{rules.opening(syntax)} call {more}"
    if request.must_call:
        return calls
    if request.structured_output is not None:
        return f"answer | {calls}"
    rules.add_text(syntax)
    if not syntax.open_tag:
        return f"PLAIN | {calls}"
    return f"PLAIN | begun call {more}"


class _Rules:
    """Rules as they are collected; each is one line of Lark."""

    def __init__(self, is_token: Callable[[str], bool]) -> None:
        self._is_token = is_token
        self._lines: list[str] = []
        self._others: list[dict[str, str]] = []

    def finish(self, start: str) -> str:
        main = "\n".join([f"start: {start}", *self._lines])
        return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, *self._others]}, ensure_ascii=False)

    def tag(self, text: str) -> str:
        return text if self._is_token(text) else _literal(text)

    def opening(self, syntax: ToolSyntax) -> str:
        return self.tag(syntax.open_tag) if syntax.open_tag else ""

    def add_thoughts(self) -> None:
        self._lines += [self._lazily("thoughts", CLOSE_TAG), _LEADING_SPACE]

    def add_text(self, syntax: ToolSyntax) -> None:
        """``PLAIN``, a text without calls, and ``begun``, one that a call interrupts."""
        if syntax.open_tag:
            self._lines += [r"PLAIN: /(.|\n)*/", self._lazily("begun", syntax.open_tag)]
        else:
            self._lines.append(r'PLAIN: /(.|\n)*/ & ~/\s*\{\s*"name"\s*:(.|\n)*/')

    def add_calls(self, request: GenerateRequest, syntax: ToolSyntax) -> None:
        named = request.tool_choice if request.must_call and request.tool_choice != "required" else None
        tools = [tool for tool in request.tools if named in (None, tool.name)]
        for number, tool in enumerate(tools):
            self._lines.append(f"arguments_{number}: {_arguments(tool)}")
        alternatives = []
        for number, tool in enumerate(tools):
            head = f'{syntax.call_head}{json.dumps(tool.name, ensure_ascii=False)}, "{syntax.arguments_key}": '
            ending = f"{_literal(syntax.call_tail)} {self.tag(syntax.close_tag)}" if syntax.close_tag else _literal("}")
            alternatives.append(f"{_literal(head)} arguments_{number} {ending}")
        self._lines.append(f"call: {' | '.join(alternatives)}")

    def add_structure(self, output: StructuredOutput) -> None:
        if output.json_schema is not None:
            self._lines.append(f"answer: {json_rule(json.loads(str(output.json_schema)))}")
        elif output.choice is not None:
            self._lines.append(f"answer: {' | '.join(map(_literal, output.choice))}")
        elif output.regex is not None:
            self._lines += ["answer: REGEX", f"REGEX: {_regex(output.regex)}"]
        else:
            assert output.grammar is not None
            self._lines.append("answer: @given")
            self._others.append({"name": "given", "lark_grammar": _lark(output.grammar)})

    def _lazily(self, rule: str, tag: str) -> str:
        """A rule for any text up to and with a tag."""
        if self._is_token(tag):
            return rf"{rule}: /(.|\n)*/ {tag}"
        return rf"{rule}[lazy]: /(.|\n)*{re.escape(tag).replace('/', chr(92) + '/')}/"


def _arguments(tool: Tool) -> str:
    return json_rule(arguments_schema(tool.name, tool.schema), lenient=not tool.strict, one_line=True)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex(pattern: str) -> str:
    """The expression between slashes, its own slashes and line breaks escaped."""
    escapes = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
    return "/" + re.sub(r"\\.|[/\n\r]", lambda found: escapes.get(found[0], found[0]), pattern, flags=re.DOTALL) + "/"


def _lark(text: str) -> str:
    if "::=" not in text:
        return text
    try:
        return str(load_gbnf_reader().any_to_lark(text))
    except Exception as error:  # the converter raises what its own parser happens to
        reason = f"structured_output: the grammar is neither Lark nor GBNF: {error}"
        raise InvalidRequestError(reason, param="structured_output") from error
