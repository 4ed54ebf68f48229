"""How the answers of a request are to be written and read: thoughts, calls and text."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..api import GenerateRequest
from ..config import EngineConfig
from ..errors import InvalidRequestError
from .answer_grammar import answer_grammar
from .grammar import Grammar, GrammarCompiler
from .output_processor import OutputText, TextDelta
from .reasoning import CLOSE_TAG, OPEN_TAG, Thinking, ThoughtSplitter
from .tokenizer import Tokenizer
from .tool_parsers import CallSplitter, call_id
from .tool_syntax import HERMES, LLAMA3_JSON, TOOL_SYNTAXES, ToolSyntax

__all__ = ["AnswerForm", "AnswerForms", "AnswerText"]

# Enough for a tag and the white space after it, however they are cut.
_TAIL = 16


@dataclass(frozen=True, kw_only=True)
class AnswerForm:
    """The form of a request's answers, shared by its choices.

    Args:
        grammar: What they are held to, if to anything.
        syntax: How calls are written in them, if there may be any.
        tool_names: What they may call.
        thinking: Whether thoughts come first.
        call_seed: What the ids of calls depend on, besides the choice and the call.
    """

    grammar: Grammar | None = None
    syntax: ToolSyntax | None = None
    tool_names: frozenset[str] = frozenset()
    thinking: Thinking = Thinking.NONE
    call_seed: tuple[object, ...] = ()


class AnswerForms:
    """Finds the form of each request's answers. Safe from many threads at once.

    Args:
        tokenizer: The model's.
        vocab_size: Columns of its logits.
        config: Names the parsers.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, config: EngineConfig) -> None:
        self._tokenizer = tokenizer
        self._compiler = GrammarCompiler(tokenizer, vocab_size)
        self._tool_call_parser = config.tool_call_parser
        self._reasoning_parser = config.reasoning_parser

    def find(self, request: GenerateRequest, prompt_ids: Sequence[int], seed: int) -> AnswerForm | None:
        """The form of a request's answers; None if they are plain text. May wait for a grammar to be compiled.

        Args:
            request: A chat or a text.
            prompt_ids: Its tokens.
            seed: Of its sampling.

        Raises:
            InvalidRequestError: A grammar is wrong or too large, or the model's way to call tools is unknown here.
        """
        thinking = self._thinking(request, prompt_ids)
        syntax = self._syntax() if request.calls_tools else HERMES
        if syntax is LLAMA3_JSON and request.calls_tools and request.structured_output is not None:
            raise InvalidRequestError(
                "structured_output beside tools is not for models that call by bare JSON (llama3_json), because one "
                "cannot be told from the other; set tool_choice to 'none' or leave one of them out",
                param="structured_output",
            )
        written = answer_grammar(request, syntax, thinking, lambda text: self._token_id(text) is not None)
        if written is None and thinking is Thinking.NONE:
            return None
        return AnswerForm(
            grammar=None if written is None else self._compiler.compile(written.text, param=written.param),
            syntax=syntax if request.calls_tools else None,
            tool_names=frozenset(tool.name for tool in request.tools),
            thinking=thinking,
            call_seed=(seed, len(prompt_ids), tuple(prompt_ids[-_TAIL:])),
        )

    def _token_id(self, text: str) -> int | None:
        return self._tokenizer.added_token_id(text)

    def _syntax(self) -> ToolSyntax:
        if self._tool_call_parser != "auto":
            return TOOL_SYNTAXES[self._tool_call_parser]
        syntax = self._tokenizer.tool_syntax
        if syntax is None:
            known = " and ".join(TOOL_SYNTAXES)
            raise InvalidRequestError(
                f"the model's chat template writes tool calls in a way that is not read here; known are {known}. Give "
                "the engine a chat_template that writes one of them, or name the model's with tool_call_parser",
                param="tools",
            )
        return syntax

    def _thinking(self, request: GenerateRequest, prompt_ids: Sequence[int]) -> Thinking:
        parser = self._reasoning_parser
        if request.messages is None or parser == "none" or (parser == "auto" and not self._tokenizer.shows_thoughts):
            return Thinking.NONE
        tail = self._tokenizer.decode(prompt_ids[-_TAIL:], skip_special_tokens=False).rstrip()
        if tail.endswith(OPEN_TAG):
            return Thinking.BEGUN
        # A template that is told to go without thoughts writes empty ones.
        return Thinking.NONE if tail.endswith(CLOSE_TAG) else Thinking.POSSIBLE


class AnswerText:
    """One choice's answer as it grows: its text, and what is no part of that.

    Args:
        tokenizer: Decodes the tokens.
        stop: Strings that end the answer.
        form: None for plain text.
        index: Which choice it is.

    Attributes:
        matcher: Follows the answer's grammar, if it has one.
        num_reasoning_tokens: Tokens of its thoughts so far, with their tags.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], form: AnswerForm | None, index: int) -> None:
        form = form or AnswerForm()
        tags = [OPEN_TAG, CLOSE_TAG] if form.thinking is not Thinking.NONE else []
        tags += [form.syntax.open_tag, form.syntax.close_tag] if form.syntax is not None else []
        # Where a model declares them special, they would be left out of the text.
        ids = {token_id: tag for tag in tags if (token_id := tokenizer.added_token_id(tag)) is not None}
        shown = {token_id: tag for token_id, tag in ids.items() if not tokenizer.has_text(token_id)}
        self._output = OutputText(tokenizer, stop, shown)
        self.matcher = None if form.grammar is None else form.grammar.new_matcher()
        self._thoughts = None if form.thinking is Thinking.NONE else ThoughtSplitter(form.thinking)
        self._calls: CallSplitter | None = None
        if form.syntax is not None:
            new_id = functools.partial(call_id, *form.call_seed, index)
            self._calls = CallSplitter(form.syntax, form.tool_names, new_id)
        self.num_reasoning_tokens = 0

    @property
    def has_whole_calls(self) -> bool:
        """Whether it has calls, and the last one is complete."""
        return self._calls is not None and self._calls.has_whole_calls

    def append(self, token_ids: Sequence[int], *, is_last: bool, may_stop: bool = True) -> TextDelta:
        """Add tokens; see ``OutputText.append``."""
        delta = self._output.append(token_ids, is_last=is_last, may_stop=may_stop)
        if self._thoughts is None and self._calls is None:
            return delta
        text, reasoning, is_last = delta.text, "", is_last or delta.stop is not None
        if self._thoughts is not None:
            was_thinking = self._thoughts.is_thinking
            reasoning, text = self._thoughts.append(text, is_last=is_last)
            if was_thinking or self._thoughts.is_thinking:
                self.num_reasoning_tokens += len(token_ids)
        if self._calls is None:
            return replace(delta, text=text, reasoning=reasoning)
        split = self._calls.append(text, is_last=is_last)
        return replace(delta, text=split.text, reasoning=reasoning, tool_calls=split.tool_calls)
