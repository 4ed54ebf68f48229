"""Tool calls and their answers on their way into a prompt, whether or not the chat template knows of them."""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..api import Message, Tool, ToolCall
from .template_sandbox import TemplateRefusalError

__all__ = [
    "ToolForm",
    "add_tool_prompt",
    "find_tool_form",
    "has_tools",
    "map_call_texts",
    "map_tool_texts",
    "shows_tools",
    "template_messages",
    "template_tools",
    "write_out_tools",
]

_PROMPT = """# Tools

You may call functions to help with the user's request. Their signatures are within <tools></tools> tags:
<tools>
{signatures}
</tools>

For each call, write a JSON object with the function's name and arguments within <tool_call></tool_call> tags:
<tool_call>
{{"name": <name>, "arguments": <arguments>}}
</tool_call>"""
# Arguments nested deeper are passed on as the text that they are.
_MAX_DEPTH = 64


@dataclass(frozen=True, kw_only=True)
class ToolForm:
    """How a template wants tool calls.

    Args:
        parses_arguments: As the object that the JSON stands for, else as its text.
        null_content: With ``content`` None instead of empty where a call comes without a text.
    """

    parses_arguments: bool = True
    null_content: bool = False


# In the order in which to try: the first is what most templates are written for.
_FORMS = tuple(
    ToolForm(parses_arguments=parses_arguments, null_content=null_content)
    for parses_arguments in (True, False)
    for null_content in (False, True)
)


def has_tools(messages: Iterable[Message]) -> bool:
    """Whether a chat has tool calls or answers to them."""
    return any(message.tool_calls or message.role == "tool" for message in messages)


def template_messages(messages: Iterable[Message], form: ToolForm) -> list[dict[str, Any]]:
    """Messages as a chat template sees them; fields that a message does not have are left out."""
    names: dict[str, str] = {}
    seen: list[dict[str, Any]] = []
    for message in messages:
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            names |= {call.id: call.name for call in message.tool_calls}
            fields["tool_calls"] = [_call_fields(call, form) for call in message.tool_calls]
            if form.null_content and not message.content:
                fields["content"] = None
        if message.tool_call_id is not None:
            fields["tool_call_id"] = message.tool_call_id
            if message.tool_call_id in names:
                fields["name"] = names[message.tool_call_id]
        seen.append(fields)
    return seen


def write_out_tools(messages: Iterable[Message]) -> list[Message]:
    """The chat with its calls and answers written into its texts, the way Hermes models have it.

    An answer becomes part of a user's turn, and is joined with the answers and the user's turns beside it: many
    templates want the user and the assistant to alternate.
    """
    written: list[Message] = []
    has_answer = False  # the last turn written
    for message in messages:
        turn, is_answer = _written_out(message), message.role == "tool"
        if written and written[-1].role == turn.role == "user" and (is_answer or has_answer):
            turn, is_answer = Message(role="user", content=f"{written.pop().content}\n{turn.content}"), True
        written.append(turn)
        has_answer = is_answer
    return written


def template_tools(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """Tools as a chat template sees them."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.schema},
        }
        for tool in tools
    ]


def add_tool_prompt(messages: Sequence[Message], tools: Iterable[Tool], *, as_system: bool) -> list[Message]:
    """The chat with what the model has to know of tools in its texts, the way Hermes models have it.

    Args:
        messages: At least one.
        tools: What the model may call.
        as_system: Into the system's message at the beginning, which is made if there is none; else into the first
            message that is the user's.
    """
    text = _PROMPT.format(signatures="\n".join(_to_json(item) for item in template_tools(tools)))
    first, *rest = messages
    if as_system:
        if first.role == "system":
            return [_with_content(first, f"{first.content}\n\n{text}"), *rest]
        return [Message(role="system", content=text), *messages]
    places = [place for place, message in enumerate(messages) if message.role == "user"]
    place = places[0] if places else 0
    message = messages[place]
    changed = list(messages)
    changed[place] = _with_content(message, f"{text}\n\n{message.content}")
    return changed


def shows_tools(render: Callable[[list[dict[str, Any]], list[dict[str, Any]]], str]) -> bool:
    """Find out whether a template shows a tool's name, description and parameters.

    Args:
        render: Renders messages and tools; is empty where the template fails or refuses.
    """
    marks = _random_words()
    name, description, parameter = next(marks), next(marks), next(marks)
    schema = {"type": "object", "properties": {parameter: {"type": "string", "description": description}}}
    tool = Tool(name=name, description=description, parameters=schema)
    text = render(template_messages([Message(role="user", content="x")], ToolForm()), template_tools([tool]))
    return all(word in text for word in (name, description, parameter))


def find_tool_form(render: Callable[[list[dict[str, Any]]], str]) -> ToolForm | None:
    """Find out whether a template shows calls, their arguments and the answers, and in which form it wants them.

    Args:
        render: Renders messages; raises TemplateRefusalError where the template does, and is empty where it fails.

    Returns:
        None if it leaves any of them out: then ``write_out_tools``.
    """
    marks = _random_words()
    first, second = (
        ToolCall(id=next(marks), name=next(marks), arguments=_to_json({next(marks): next(marks)})) for _ in range(2)
    )

    def shows(form: ToolForm, *calls: ToolCall, content: str = "") -> bool:
        answers = [Message(role="tool", content=next(marks), tool_call_id=call.id) for call in calls]
        asked = Message(role="assistant", content=content, tool_calls=calls)
        try:
            text = render(template_messages([Message(role="user", content="x"), asked, *answers], form))
        except TemplateRefusalError:
            return len(calls) > 1  # some models make one call at a time, and their templates say so
        arguments = (word for call in calls for pair in json.loads(call.arguments).items() for word in pair)
        expected = [*(call.name for call in calls), *(answer.content for answer in answers), *arguments]
        return all(word in text for word in expected)

    for form in _FORMS:
        # Some show calls only where there is no text beside them, or only the first of several.
        if shows(form, first) and shows(form, first, content="x") and shows(form, first, second):
            return form
    return None


def map_call_texts(call: ToolCall, change: Callable[[str], str]) -> ToolCall:
    """The call with its name changed, and every text in its arguments, as it is meant and not as JSON spells it."""
    arguments = _read_arguments(call.arguments)
    changed = _map_strings(arguments, change)
    return dataclasses.replace(
        call, name=change(call.name), arguments=changed if isinstance(changed, str) else _to_json(changed)
    )


def map_tool_texts(tool: Tool, change: Callable[[str], str]) -> Tool:
    """The tool with every text in it changed, but for its name, which the model has to write."""
    parameters = _map_strings(tool.schema, change)
    return dataclasses.replace(tool, description=change(tool.description), parameters=parameters)


def _with_content(message: Message, content: str) -> Message:
    return Message(role=message.role, content=content, tool_calls=message.tool_calls, tool_call_id=message.tool_call_id)


def _call_fields(call: ToolCall, form: ToolForm) -> dict[str, Any]:
    arguments = _read_arguments(call.arguments)
    if isinstance(arguments, dict) and not form.parses_arguments:
        arguments = _to_json(arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _written_out(message: Message) -> Message:
    if message.role == "tool":
        return Message(role="user", content=f"<tool_response>\n{message.content}\n</tool_response>")
    if not message.tool_calls:
        return message
    calls = [
        f"<tool_call>\n{_to_json({'name': call.name, 'arguments': _read_arguments(call.arguments)})}\n</tool_call>"
        for call in message.tool_calls
    ]
    return Message(role=message.role, content="\n".join([*([message.content] if message.content else []), *calls]))


def _read_arguments(text: str) -> dict[str, Any] | str:
    """The object that arguments stand for; the text itself if a model wrote something else."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) and _is_plain(value, _MAX_DEPTH) else text


def _is_plain(value: Any, depth: int) -> bool:
    """Whether a value of JSON can be written again: not too deep, finite, and no half of a character in it."""
    if isinstance(value, str):
        return not any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, (dict, list)):
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        return depth > 0 and all(_is_plain(item, depth - 1) for item in inner)
    return True


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    return value


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _random_words() -> Iterator[str]:
    """Words that no template has in it. Of nine letters and digits, as Mistral's templates want the id of a call."""
    while True:
        yield f"m{secrets.token_hex(4)}"
