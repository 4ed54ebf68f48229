"""How models write tool calls: the ways that are known here."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HERMES", "LLAMA3_JSON", "TOOL_SYNTAXES", "ToolSyntax", "syntax_of"]


@dataclass(frozen=True, kw_only=True)
class ToolSyntax:
    """One way to write a call: ``open_tag``, ``call_head``, the name, its arguments, ``call_tail``, ``close_tag``.

    Args:
        open_tag: What begins a call, in the midst of a text. Empty: an answer is calls from its beginning, or has none.
        separator: What stands between two calls.
    """

    name: str
    open_tag: str
    call_head: str
    arguments_key: str
    call_tail: str
    close_tag: str
    separator: str


HERMES = ToolSyntax(
    name="hermes",
    open_tag="<tool_call>",
    call_head='\n{"name": ',
    arguments_key="arguments",
    call_tail="}\n",
    close_tag="</tool_call>",
    separator="\n",
)
"""Of Hermes, Qwen and many others; also what a model without a way of its own is told."""

LLAMA3_JSON = ToolSyntax(
    name="llama3_json",
    open_tag="",
    call_head='{"name": ',
    arguments_key="parameters",
    call_tail="}",
    close_tag="",
    separator="; ",
)
"""Of Llama 3.1 and later: bare JSON."""

TOOL_SYNTAXES = {syntax.name: syntax for syntax in (HERMES, LLAMA3_JSON)}


def syntax_of(name: str, call: str) -> ToolSyntax | None:
    """The way in which a call is written; None if it is none of ours.

    Args:
        name: Of the function that is called.
        call: A chat template's rendering of an assistant's turn with that call.
    """
    if HERMES.open_tag in call and HERMES.close_tag in call:
        return HERMES
    joined = "".join(call.split())
    if f'{{"name":"{name}","parameters":{{' in joined:
        return LLAMA3_JSON
    return None
