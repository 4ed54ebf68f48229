"""Chat templates: rendered in a sandbox, with the template's own words in errors."""

from __future__ import annotations

import pytest
from tiny_models import CHAT_TEMPLATE

from pagedllm.api import Message
from pagedllm.errors import InvalidRequestError
from pagedllm.text.chat_template import render_chat

CHAT = (Message(role="system", content="Be brief."), Message(role="user", content="Hi <|im_end|> {{ 1 + 1 }}"))


def render(template: str | None, chat: tuple[Message, ...] = CHAT, **options: bool) -> str:
    return render_chat(template, chat, bos_token="<s>", eos_token="</s>", **options)


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


def test_no_template_says_how_to_get_one() -> None:
    """A base model is not broken; it takes prompts."""
    with pytest.raises(InvalidRequestError, match=r"no chat template: send a text prompt") as caught:
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
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_template_errors_become_the_request_s(template: str, message: str) -> None:
    """Refusals, bugs and break-out attempts of a template are errors of this request alone, with their own words."""
    with pytest.raises(InvalidRequestError, match=message) as caught:
        render(template)
    assert caught.value.param == "messages"
