"""Chat messages to prompt text by a Jinja template, and what is wrong with the messages where the template refuses."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from ..api import Message, Tool, ToolCall
from ..errors import ConfigError, InvalidRequestError
from .reasoning import CLOSE_TAG, OPEN_TAG
from .template_sandbox import TemplateRefusalError, compile_template, render_template
from .tool_messages import (
    ToolForm,
    add_tool_prompt,
    find_tool_form,
    has_tools,
    shows_tools,
    template_messages,
    template_tools,
    write_out_tools,
)
from .tool_syntax import HERMES, ToolSyntax, syntax_of

__all__ = ["ChatTemplate", "read_chat_template"]

_MAX_FILE_BYTES = 1 << 20
# A template is a program of somebody else's: these are its bugs, besides its own TemplateErrors.
_TEMPLATE_BUGS = (
    *(TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError),
    *(RecursionError, MemoryError, NotImplementedError),
)


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A model's chat template with what it sees besides the chat.

    Args:
        source: Jinja; None if the model has none. It is not trusted: see ``template_sandbox``.
        bos_token: What the template knows by that name; empty if the model has none.
        eos_token: Likewise.
        variables: The operator's, such as ``enable_thinking``.
    """

    source: str | None
    bos_token: str = ""
    eos_token: str = ""
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        now: datetime | None = None,
    ) -> str:
        """Render a chat. The text has the template's control tokens, so encode it with ``add_special_tokens=False``.

        Tools, calls and answers that the template does not show are written into the texts (``add_tool_prompt``,
        ``write_out_tools``).

        Args:
            messages: The chat, oldest first.
            tools: What the model is told that it may call.
            add_generation_prompt: End with the opening of an assistant's turn.
            continue_final_message: End with the exact text of the last message, its turn left open.
            now: The time that the template is told; None: now.

        Raises:
            InvalidRequestError: No template, or the template refuses these messages; with its own words and, where
                that can be found out, the rule behind them.
        """
        if self.source is None:
            raise InvalidRequestError(
                "this model has no chat template: send a text prompt instead, use an instruct variant of the model, "
                "put a chat_template.jinja beside its tokenizer files, or give the engine option chat_template",
                param="messages",
            )
        if continue_final_message and messages[-1].tool_calls:
            raise InvalidRequestError(
                "continue_final_message: the last message has tool calls, so its text is complete",
                param="continue_final_message",
            )
        now = now or datetime.now()
        if has_tools(messages) and self._tool_form is None:
            messages = write_out_tools(messages)
        if tools and not self._shows_tools:
            messages, tools = add_tool_prompt(messages, tools, as_system=self._takes_system), ()
        try:
            if continue_final_message:
                return self._render_open(messages, tools, now)
            return self._render(messages, tools, add_generation_prompt, now)
        except _TEMPLATE_BUGS as error:
            if isinstance(error, InvalidRequestError):  # is a ValueError
                raise
            rule = self._broken_rule(messages, now) if isinstance(error, TemplateRefusalError) else None
            reason = f"{error} ({rule})" if rule else str(error) or type(error).__name__
            raise InvalidRequestError(
                f"the chat template refuses these messages: {reason}", param="messages"
            ) from error

    @functools.cached_property
    def tool_syntax(self) -> ToolSyntax | None:
        """How the template writes calls, which is how its model does; None if that is no way that is known here."""
        if self._tool_form is None:
            return HERMES  # as they are written out
        name = f"m{secrets.token_hex(4)}"
        call = ToolCall(id="x" * 9, name=name, arguments='{"x": "x"}')
        chat = [
            Message(role="user", content="x"),
            Message(role="assistant", tool_calls=[call]),
            Message(role="tool", content="x", tool_call_id=call.id),
        ]
        return syntax_of(name, self._render(chat, (), False, datetime.now()))

    @property
    def shows_thoughts(self) -> bool:
        """Whether the template has to do with thoughts in tags, so that its model writes them."""
        return self.source is not None and (OPEN_TAG in self.source or CLOSE_TAG in self.source)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Tool], add_generation_prompt: bool, now: datetime
    ) -> str:
        form = self._tool_form if has_tools(messages) else None
        fields = template_messages(messages, form or ToolForm())
        return self._render_fields(fields, template_tools(tools), add_generation_prompt, now)

    def _render_fields(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        add_generation_prompt: bool,
        now: datetime,
    ) -> str:
        assert self.source is not None
        variables = {
            "tools": tools or None,
            "documents": None,
            **self.variables,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
        }
        return render_template(compile_template(self.source), variables, now=now)

    @functools.cached_property
    def _tool_form(self) -> ToolForm | None:
        """How the template wants tool calls; None if it does not show them."""

        def render(messages: list[dict[str, Any]]) -> str:
            try:
                return self._render_fields(messages, [], True, datetime.now())
            except TemplateRefusalError:
                raise
            except _TEMPLATE_BUGS:
                return ""

        return find_tool_form(render)

    @functools.cached_property
    def _shows_tools(self) -> bool:
        """Whether the template tells the model of tools."""
        return shows_tools(lambda messages, tools: self._try(messages, tools))

    @functools.cached_property
    def _takes_system(self) -> bool:
        """Whether the template shows a system message."""
        mark = f"m{secrets.token_hex(4)}"
        chat = [Message(role="system", content=mark), Message(role="user", content="x")]
        return mark in self._try(template_messages(chat, ToolForm()), [])

    def _try(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        """Render; empty where the template refuses or fails."""
        try:
            return self._render_fields(messages, tools, True, datetime.now())
        except _TEMPLATE_BUGS:
            return ""

    def _render_open(self, messages: Sequence[Message], tools: Sequence[Tool], now: datetime) -> str:
        """Render up to the end of the last message's content.

        A mark at its end shows where that is, and keeps a template that trims from taking white space off it.
        """
        *earlier, last = messages
        mark = f"\U000f0000{secrets.randbits(64)}\U000f0000"
        marked = Message(role=last.role, content=last.content + mark)
        text, found, _ = self._render([*earlier, marked], tools, False, now).rpartition(mark)
        # White space before it is the template's to lay out.
        if not found or not text.endswith(last.content.lstrip()):
            raise InvalidRequestError(
                "continue_final_message: the chat template does not keep the last message's text as it is",
                param="continue_final_message",
            )
        return text

    def _broken_rule(self, messages: Sequence[Message], now: datetime) -> str | None:
        """The rule of the template that these messages break, found by trying what it accepts in their place."""

        def is_accepted(roles: Sequence[str]) -> bool:
            try:
                self._render([Message(role=role, content="x") for role in roles], (), True, now)
            except _TEMPLATE_BUGS:
                return False
            return True

        return _find_rule([message.role for message in messages], is_accepted)


def read_chat_template(option: str) -> str:
    """The Jinja source of an operator's template, given as such or as the path of a file.

    Raises:
        ConfigError: No such file, or not a template.
    """
    source = option if "{{" in option or "{%" in option else _read_file(Path(option).expanduser())
    try:
        compile_template(source)
    except (*_TEMPLATE_BUGS, SyntaxError) as error:
        place = f" in line {line}" if (line := getattr(error, "lineno", None)) else ""
        raise ConfigError.for_value("chat_template", option, f"is not a Jinja template: {error}{place}") from error
    return source


def _read_file(path: Path) -> str:
    option = "chat_template"
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError.for_value(option, str(path), f"must have at most {_MAX_FILE_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, ConfigError):  # is a ValueError
            raise
        allowed = f"must be Jinja (with {{{{ or {{%) or the path of a file with it: {error}"
        raise ConfigError.for_value(option, str(path), allowed) from error


# What a template may want of the roles, and how to give it that. In the order in which to look.
_RULES: tuple[tuple[str, Callable[[Sequence[str]], list[str]]], ...] = (
    (
        "this template knows no roles but system, user and assistant",
        lambda roles: [role if role in ("system", "user", "assistant") else "user" for role in roles],
    ),
    (
        "this template wants at most one system message, and at the beginning",
        lambda roles: ["system"] * ("system" in roles) + [role for role in roles if role != "system"],
    ),
    ("this template takes no system message", lambda roles: [role for role in roles if role != "system"]),
    (
        "this template wants user and assistant to alternate",
        lambda roles: [role for role, _ in itertools.groupby(roles)],
    ),
    (
        "this template wants the first message after the system's to be the user's",
        lambda roles: _with_user_first(roles),
    ),
    (
        "this template wants the last message to be the user's",
        lambda roles: [*roles, "user"] if roles[-1:] == ["assistant"] else list(roles),
    ),
)


def _with_user_first(roles: Sequence[str]) -> list[str]:
    num_system = sum(1 for _ in itertools.takewhile(lambda role: role == "system", roles))
    if roles[num_system : num_system + 1] == ["user"]:
        return list(roles)
    return [*roles[:num_system], "user", *roles[num_system:]]


def _find_rule(roles: list[str], is_accepted: Callable[[Sequence[str]], bool]) -> str | None:
    """The fewest rules that, obeyed, make the roles accepted; None if there are none, or roles are not the reason."""
    if is_accepted(roles):
        return None
    for count in (1, 2, 3):
        for rules in itertools.combinations(_RULES, count):
            obeying = roles
            for _, obey in rules:
                if obey(obeying) == obeying:
                    break  # is obeyed already, so it is not what is broken
                obeying = obey(obeying)
            else:
                if obeying and is_accepted(obeying):
                    return "; ".join(rule for rule, _ in rules)
    return None
