"""Chat messages to prompt text, through transformers' sandboxed Jinja."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from ..api import Message
from ..errors import InvalidRequestError

__all__ = ["render_chat"]


def render_chat(
    template: str | None,
    messages: Sequence[Message],
    *,
    bos_token: str,
    eos_token: str,
    add_generation_prompt: bool = True,
) -> str:
    """Render a chat. The text has the template's control tokens, so encode it with ``add_special_tokens=False``.

    The template comes with the model and is not trusted: it runs in an immutable sandbox and sees plain data only.
    Compiled templates are cached. Control tokens written in a message's content are not escaped.

    Args:
        template: Jinja source; None if the model has none.
        messages: The chat, oldest first.
        bos_token: What the template knows by that name; empty if the model has none.
        eos_token: Likewise.
        add_generation_prompt: End with the opening of an assistant's turn.

    Raises:
        InvalidRequestError: No template, or the template refuses these messages; has its own message.
    """
    if template is None:
        raise InvalidRequestError(
            "this model has no chat template: send a text prompt instead, use an instruct variant of the model, or "
            "put a chat_template.jinja beside its tokenizer files",
            param="messages",
        )
    chat = [{"role": message.role, "content": message.content} for message in messages]
    try:
        rendered, _ = render_jinja_template(
            conversations=[chat],
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            bos_token=bos_token,
            eos_token=eos_token,
        )
    except (
        TemplateError,
        TypeError,
        ValueError,
        ArithmeticError,
        LookupError,
        AttributeError,
        RecursionError,
    ) as error:
        # A template is a program of somebody else's: raise_exception gives TemplateError, its bugs the others.
        raise InvalidRequestError(f"the chat template refuses these messages: {error}", param="messages") from error
    return str(rendered[0])
