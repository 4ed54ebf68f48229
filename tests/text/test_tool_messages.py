"""Tool calls and answers reach the prompt: by the template where it shows them, else written out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tiny_models import CHAT_TEMPLATE
from tool_templates import HERMES, LLAMA3, MISTRAL, NULL_TEXT, TOOL_TEMPLATES
from transformers.utils.chat_template_utils import render_jinja_template

from pagedllm.api import Message, ToolCall
from pagedllm.errors import InvalidRequestError
from pagedllm.files.locate import locate_model
from pagedllm.text.chat_template import ChatTemplate
from pagedllm.text.tokenizer import load_tokenizer

ASK = Message(role="user", content="Weather in Łódź and Oslo?")
LODZ = ToolCall(id="call00001", name="get_weather", arguments='{"city":"Łódź","days": 2}')
OSLO = ToolCall(id="call00002", name="get_time", arguments="{}")
SUNNY = Message(role="tool", content="sunny", tool_call_id="call00001")
LATE = Message(role="tool", content='{"time": "late"}', tool_call_id="call00002")
THANKS = Message(role="user", content="Thanks")


def calling(*calls: ToolCall, content: str | None = None) -> Message:
    return Message(role="assistant", content=content, tool_calls=calls)


def render(template: str, *chat: Message, **options: Any) -> str:
    return ChatTemplate(source=template).render(chat, **options)


def as_openai(message: Message, *, as_text: bool, name: str | None) -> dict[str, Any]:
    """What a user of transformers gives to ``apply_chat_template``."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        if as_text and not message.content:
            fields["content"] = None
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(json.loads(call.arguments), ensure_ascii=False)
                    if as_text
                    else json.loads(call.arguments),
                },
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        fields |= {"tool_call_id": message.tool_call_id, "name": name}
    return fields


@pytest.mark.parametrize("content", [None, "Let me see."])
@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_a_template_that_knows_tools_gets_what_transformers_gives_it(name: str, content: str | None) -> None:
    """Another field, or arguments as a text, and the model reads calls as it has never seen them."""
    chat = [ASK, calling(LODZ, content=content), SUNNY, Message(role="assistant", content="Sunny."), THANKS]
    given = [as_openai(message, as_text=name == "null and text", name="get_weather") for message in chat]
    [expected], _ = render_jinja_template(
        conversations=[given], chat_template=TOOL_TEMPLATES[name], add_generation_prompt=True
    )
    text = render(TOOL_TEMPLATES[name], *chat)
    assert text == expected
    assert text.count("get_weather") == (2 if name == "mistral" else 1)
    assert "Łódź" in text


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_several_calls_and_answers(name: str) -> None:
    chat = [ASK, calling(LODZ, OSLO), SUNNY, LATE]
    names = [None, None, "get_weather", "get_time"]
    given = [as_openai(message, as_text=False, name=name) for message, name in zip(chat, names, strict=True)]
    [expected], _ = render_jinja_template(
        conversations=[given], chat_template=TOOL_TEMPLATES[name], add_generation_prompt=True
    )
    assert render(TOOL_TEMPLATES[name], *chat) == expected


def test_a_template_s_own_rules_for_tools_are_told() -> None:
    with pytest.raises(InvalidRequestError, match="one call at a time"):
        render(LLAMA3, ASK, calling(LODZ, OSLO), SUNNY, LATE)
    odd = ToolCall(id="call_1", name="f", arguments="{}")
    with pytest.raises(InvalidRequestError, match="must have 9 characters"):
        render(MISTRAL, ASK, calling(odd))


ROLE_AND_CONTENT = "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n{% endfor %}"
DROPPING = {
    # The embedded model's template is like this one: the answer is shown, the call is not.
    "role and content": ROLE_AND_CONTENT,
    "refuses the role": CHAT_TEMPLATE.split("{% if add_gen")[0],
    "call but not its arguments": ROLE_AND_CONTENT.replace(
        "{{ m.role", "{{ m.tool_calls[0].function.name if m.tool_calls else '' }}{{ m.role"
    ),
    "first call only": HERMES.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
    "call but no answer": HERMES.replace("'\\n<tool_response>\\n' ~ m.content", "'\\n<tool_response>\\n'"),
    "calls or text": NULL_TEXT.replace("m.content is none or m.tool_calls", "m.content is none"),
}
WRITTEN = """<|im_start|>user
Weather in Łódź and Oslo?<|im_end|>
<|im_start|>assistant
Let me see.
<tool_call>
{"name": "get_weather", "arguments": {"city": "Łódź", "days": 2}}
</tool_call>
<tool_call>
{"name": "get_time", "arguments": {}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
sunny
</tool_response>
<tool_response>
{"time": "late"}
</tool_response><|im_end|>
"""


@pytest.mark.parametrize("name", DROPPING)
def test_what_a_template_would_drop_is_written_out(name: str) -> None:
    """A call or an answer that is left out in silence makes the model invent one."""
    chat = [ASK, calling(LODZ, OSLO, content="Let me see."), SUNNY, LATE]
    text = render(DROPPING[name], *chat, add_generation_prompt=False)
    assert text.replace("<|im_end|>\n", "<|im_end|>") == WRITTEN.replace("<|im_end|>\n", "<|im_end|>")


def test_written_answers_share_a_turn_with_the_user_beside_them() -> None:
    """Or templates that want user and assistant to alternate would refuse every chat with tools."""
    alternating = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    text = render(alternating, ASK, calling(OSLO), LATE, SUNNY, THANKS, Message(role="assistant", content="!"), THANKS)
    assert text == (
        f'[user]{ASK.content}[assistant]<tool_call>\n{{"name": "get_time", "arguments": {{}}}}\n</tool_call>[user]'
        '<tool_response>\n{"time": "late"}\n</tool_response>\n<tool_response>\nsunny\n</tool_response>\nThanks'
        "[assistant]![user]Thanks"
    )
    with pytest.raises(InvalidRequestError, match="must alternate"):
        render(alternating, ASK, calling(OSLO), LATE, Message(role="assistant", content="!"), THANKS, THANKS)


@pytest.mark.parametrize("template", [HERMES, ROLE_AND_CONTENT])
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("", "{}"),
        (" \n", "{}"),
        ('{"a": 1, "b": [null, true, 0.5, "\\u0142"]}', '{"a": 1, "b": [null, true, 0.5, "ł"]}'),
        ('{"a": ', r'"{\"a\": "'),
        ("[1]", '"[1]"'),
        ('{"a": NaN}', r'"{\"a\": NaN}"'),
        ('{"a": 1e999}', r'"{\"a\": 1e999}"'),
        ('{"a": "\\ud83d"}', r'"{\"a\": \"\\ud83d\"}"'),
        ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", json.dumps('{"a": ' + "[" * 5000 + "]" * 5000 + "}")),
    ],
)
def test_arguments(template: str, arguments: str, shown: str) -> None:
    """Small models write arguments that are no JSON; that must be seen by the model, and not break the chat."""
    text = render(template, ASK, calling(ToolCall(id="1", name="f", arguments=arguments)))
    assert f'{{"name": "f", "arguments": {shown}}}' in text


def test_an_answer_to_no_call() -> None:
    """Allowed, as by other engines: the beginning of a chat may have been cut off."""
    assert "<tool_response>\nsunny\n" in render(HERMES, ASK, SUNNY)
    assert "<tool_response>\nsunny\n" in render(ROLE_AND_CONTENT, ASK, SUNNY)
    assert "<tool_response>\n\n" in render(ROLE_AND_CONTENT, Message(role="tool", content=None))


def test_a_turn_with_calls_cannot_be_continued() -> None:
    """What would be continued is the text before the calls, and they would be lost."""
    for template in (HERMES, ROLE_AND_CONTENT):
        with pytest.raises(InvalidRequestError, match="last message has tool calls") as caught:
            render(template, ASK, calling(LODZ, content="x"), add_generation_prompt=False, continue_final_message=True)
        assert caught.value.param == "continue_final_message"
        prefill = Message(role="assistant", content="It is ")
        chat = (ASK, calling(LODZ), SUNNY, prefill)
        text = render(template, *chat, add_generation_prompt=False, continue_final_message=True)
        assert text.endswith("<|im_start|>assistant\nIt is ")
        assert "get_weather" in text


def test_the_rule_behind_a_refusal_is_that_of_the_chat_as_it_was_written_out() -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + ROLE_AND_CONTENT
    with pytest.raises(InvalidRequestError, match=r"no system \(this template takes no system message\)"):
        render(template, Message(role="system", content="x"), ASK, calling(LODZ), SUNNY)


def test_a_template_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chat would else be rendered a dozen times more."""
    template = ChatTemplate(source=ROLE_AND_CONTENT)
    calls: list[Any] = []
    original = ChatTemplate._render_fields
    monkeypatch.setattr(ChatTemplate, "_render_fields", lambda *args: calls.append(args) or original(*args))
    template.render([ASK, calling(LODZ), SUNNY])
    assert len(calls) > 1
    calls.clear()
    template.render([ASK, calling(LODZ), SUNNY])
    assert len(calls) == 1


@pytest.mark.model
def test_the_embedded_model_s_template() -> None:
    """It writes role and content alone, and would leave out the calls."""
    tokenizer = load_tokenizer(locate_model("smollm2-135m"))
    system = Message(role="system", content="")
    chat = [system, ASK, calling(LODZ, OSLO, content="Let me see."), SUNNY, LATE]
    ids = tokenizer.encode_chat(chat, add_generation_prompt=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"<|im_start|>system\n<|im_end|>\n{WRITTEN}"
