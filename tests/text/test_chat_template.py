"""Chat templates: rendered in a sandbox, within bounds, with the template's own words in errors."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tiny_models import CHAT_TEMPLATE
from transformers.utils.chat_template_utils import render_jinja_template

from pagedllm.api import Message
from pagedllm.errors import ConfigError, InvalidRequestError
from pagedllm.text import template_sandbox
from pagedllm.text.chat_template import ChatTemplate, read_chat_template

CHAT = (Message(role="system", content="Be brief."), Message(role="user", content="Hi <|im_end|> {{ 1 + 1 }}"))
# The rules of well-known families.
ALTERNATING = """{% set start = 1 if messages[0].role == 'system' else 0 %}
{%- for m in messages[start:] %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate u/a/u/a') }}{% endif %}
{{- '[' ~ m.role ~ ']' ~ m.content | trim }}
{%- endfor %}"""
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
SYSTEM_FIRST = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}
{{ raise_exception('system must be first') }}{% endif %}{{ m.content }}{% endfor %}"""
LAST_IS_USER = "{% if messages[-1].role != 'user' %}{{ raise_exception('say something') }}{% endif %}ok"


def render(template: str | None, chat: tuple[Message, ...] = CHAT, **options: Any) -> str:
    return ChatTemplate(source=template, bos_token="<s>", eos_token="</s>").render(chat, **options)


def chat_of(*roles: str) -> tuple[Message, ...]:
    return tuple(Message(role=role, content="x") for role in roles)


def test_renders_messages_as_they_are() -> None:
    """Content is data: Jinja in it is not run, and white space stays."""
    text = render(CHAT_TEMPLATE)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi <|im_end|> {{ 1 + 1 }}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text == render(CHAT_TEMPLATE, add_generation_prompt=False) + "<|im_start|>assistant\n"


def test_template_sees_the_special_tokens() -> None:
    """Many templates write BOS themselves."""
    assert render("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}") == "<s>Be brief.</s>"


@pytest.mark.parametrize(
    "template",
    [
        CHAT_TEMPLATE,
        ALTERNATING,
        "{% for m in messages recursive %}{{ loop.index }}/{{ loop.length }}{{ loop.nextitem }}{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ m['content'] | tojson(indent=2) }}{% else %}none{% endfor %}",
        " {% set ns = namespace(n=0) %}\n {% for c in 'ab' %}\n{% set ns.n = ns.n + 1 %}{% endfor %}\n{{ ns.n }}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content }} {% endgeneration %}{% endfor %}",
        "{% for k, v in messages[0] | items %}{{ k ~ v }}{% endfor %}{{ dict(a=1) }}{{ tools is none }}",
        "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(messages | length) }}{{ '=' * 20 }}{{ strftime_now('%Y') }}",
        "{{ messages[0].content.split(' ')[-1].strip('.') | upper }}{{ messages[::-1][0].role }}{{ range(3) | list }}",
    ],
)
def test_renders_as_transformers(template: str) -> None:
    """Templates are written for transformers, so it is the reference for what they mean."""
    chat = [{"role": message.role, "content": message.content} for message in CHAT]
    options = {"add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
    [expected], _ = render_jinja_template(conversations=[chat], chat_template=template, **options)
    assert render(template) == expected


def test_no_template_says_how_to_get_one() -> None:
    """A base model is not broken; it takes prompts."""
    with pytest.raises(InvalidRequestError, match=r"no chat template: send a text prompt.*chat_template") as caught:
        render(None)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages[9].content }}", "no element 9"),
        ("{{ 1 / 0 }}", "division"),
        ("{% for %}", "Expected"),
        ("{{ nothing.at_all }}", "nothing"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.clear() }}", "unsafe"),
        ("{{ raise_exception.__globals__.x }}", "unsafe"),
        ("{% set ns = namespace(__class__=1) %}", "unsafe"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ lipsum() }}", "lipsum"),
        ("{% include 'x' %}", "loader"),
    ],
)
def test_template_errors_become_the_request_s(template: str, message: str) -> None:
    """Refusals, bugs and break-out attempts of a template are errors of this request alone, with their own words."""
    with pytest.raises(InvalidRequestError, match=message) as caught:
        render(template)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
        "{% for i in range(10 ** 12) %}{% endfor %}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ [1] * 10 ** 10 }}",
        "{{ 10 ** 10 * 'x' }}",
        "{{ 10 ** (10 ** 10) }}",
    ],
)
def test_a_template_that_never_ends_is_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in the caller's thread, and a server has only so many."""
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 50_000)
    start = time.monotonic()
    with pytest.raises(InvalidRequestError, match=r"more than \d+|too big"):
        render(template)
    assert time.monotonic() - start < 5


def test_bounds_leave_room_for_the_longest_chats() -> None:
    chat = chat_of("system", *["user", "assistant"] * 5000)
    assert len(render(CHAT_TEMPLATE, chat)) > 100_000
    long = (Message(role="user", content="x" * 10_000_000),)
    assert len(render(CHAT_TEMPLATE, long)) > 10_000_000


@pytest.mark.parametrize(
    ("template", "roles", "words", "rule"),
    [
        (ALTERNATING, "system user user", "must alternate", "wants user and assistant to alternate"),
        (ALTERNATING, "user assistant assistant user", "must alternate", "wants user and assistant to alternate"),
        (ALTERNATING, "assistant user", "must alternate", "first message after the system's to be the user's"),
        (NO_SYSTEM, "system user", "System role not supported", "takes no system message"),
        (NO_SYSTEM + ALTERNATING, "system user user", "not supported", "no system message; this template wants user"),
        (SYSTEM_FIRST, "system system user", "system must be first", "at most one system message"),
        (SYSTEM_FIRST, "user system user", "system must be first", "at most one system message"),
        (CHAT_TEMPLATE, "wizard", "unknown role", "knows no roles but system, user and assistant"),
        (LAST_IS_USER, "user assistant", "say something", "wants the last message to be the user's"),
    ],
)
def test_row_41_the_rule_is_named(template: str, roles: str, words: str, rule: str) -> None:
    """ "Jinja error" does not tell what to change."""
    with pytest.raises(InvalidRequestError, match=f"{words}.*{rule}"):
        render(template, chat_of(*roles.split()))


def test_row_41_no_rule_is_made_up() -> None:
    """A template that refuses for what the messages say breaks no rule of roles."""
    template = "{% if 'bad' in messages[-1].content %}{{ raise_exception('no bad words') }}{% endif %}"
    with pytest.raises(InvalidRequestError, match=r"no bad words$"):
        render(template, (*chat_of("system", "user"), Message(role="user", content="bad")))
    with pytest.raises(InvalidRequestError, match=r"never$"):
        render("{{ raise_exception('never') }}")


@pytest.mark.parametrize("text", ["OK! ", "OK!", " \n OK\n\n", "", " ", "a<|im_end|>b", "OK! OK! "])
@pytest.mark.parametrize(
    "template", [CHAT_TEMPLATE, CHAT_TEMPLATE.replace("message['content']", "message.content | trim")]
)
def test_row_75_prefill_keeps_the_exact_text(template: str, text: str) -> None:
    """Trailing white space is part of it, even where the template trims; what comes before is the template's."""
    chat = (Message(role="user", content="OK! "), Message(role="assistant", content=text))
    got = render(template, chat, add_generation_prompt=False, continue_final_message=True)
    user = "OK! " if template is CHAT_TEMPLATE else "OK!"
    expected = f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    assert got == expected + (text if template is CHAT_TEMPLATE else text.lstrip())


@pytest.mark.parametrize("template", ["x", "{{ messages[1].content | upper }}", "{{ messages[1].content[:2] }}"])
def test_row_75_prefill_of_a_template_that_changes_it(template: str) -> None:
    chat = (Message(role="user", content="hi"), Message(role="assistant", content="Sure"))
    with pytest.raises(InvalidRequestError, match="does not keep the last message's text") as caught:
        render(template, chat, add_generation_prompt=False, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_the_time_is_the_caller_s() -> None:
    """A chat is rendered twice at times, and midnight must not come between."""
    now = datetime(2024, 2, 29, 23, 59)
    assert render("{{ strftime_now('%d %b %Y %H:%M') }}", now=now) == "29 Feb 2024 23:59"


def test_variables_of_the_operator() -> None:
    template = "{{ messages[0].role }}{{ enable_thinking }}{{ bos_token }}"
    variables = {"enable_thinking": False, "bos_token": "never"}
    text = ChatTemplate(source=template, bos_token="<s>", variables=variables).render(CHAT)
    assert text == "systemFalse<s>"


def test_operator_s_template_as_text_and_as_file(tmp_path: Path) -> None:
    path = tmp_path / "my template.jinja"
    path.write_text(CHAT_TEMPLATE + "{# ž #}", encoding="utf-8")
    assert read_chat_template(str(path)) == CHAT_TEMPLATE + "{# ž #}"
    assert read_chat_template(CHAT_TEMPLATE) == CHAT_TEMPLATE


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("{% for %}", r"not a Jinja template: .* in line 1"),
        ("{{ x | no_such_filter }}", "no_such_filter"),
        ("{% break %}", "not a Jinja template"),
        ("/nowhere/at/all.jinja", r"path of a file with it.*No such file"),
        ("x" * 5000, "path of a file with it"),
        ("a\0b", "path of a file with it"),
        (".", "path of a file with it"),
    ],
)
def test_operator_s_template_that_is_none(option: str, message: str) -> None:
    """At load, by the one who can mend it; not at the first chat."""
    with pytest.raises(ConfigError, match=f"chat_template=.*{message}"):
        read_chat_template(option)


def test_operator_s_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "t"
    for content, message in ((b"\xff{{", "utf-8"), (b"{{ 1 +", "not a Jinja template"), (b"x" * (1 << 21), "at most")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            read_chat_template(str(path))
