"""TokenLogprob <-> JSON, in the form of each API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..api import TokenLogprob

__all__ = [
    "Echo",
    "decode_completion_logprobs",
    "decode_content",
    "decode_prompt_logprobs",
    "encode_completion_logprobs",
    "encode_content",
    "encode_prompt_logprobs",
]

UNKNOWN_ID = -1
"""The token id where a server does not tell it."""


@dataclass(frozen=True, kw_only=True)
class Echo:
    """A prompt that its completions begin with.

    Args:
        text: Of the prompt.
        tokens: Text of each token and, if asked for, its log probability; the first has none.
    """

    text: str
    tokens: tuple[tuple[str, TokenLogprob | None], ...] = ()


def encode_content(items: Sequence[TokenLogprob], *, with_ids: bool) -> list[dict[str, Any]]:
    """The list ``content`` of a chat's ``logprobs``; ``token_id`` is ours."""
    return [
        _encode_token(item, with_ids) | {"top_logprobs": [_encode_token(top, with_ids) for top in item.top]}
        for item in items
    ]


def decode_content(content: Sequence[Any]) -> tuple[TokenLogprob, ...]:
    return tuple(
        _decode_token(item, tuple(_decode_token(top) for top in item.get("top_logprobs") or ())) for item in content
    )


def encode_completion_logprobs(
    items: Sequence[TokenLogprob], *, offset: int, with_ids: bool, echo: Echo | None = None
) -> dict[str, Any]:
    """The ``logprobs`` of a completion.

    Args:
        offset: Characters of the choice's text that come before the first token.
        with_ids: Add ``content`` as chats have it, from which the tokens can be rebuilt exactly.
        echo: The prompt, if the text begins with it.
    """
    encoded = _encode_lists((*(echo.tokens if echo else ()), *((item.token, item) for item in items)), offset)
    return encoded | ({"content": encode_content(items, with_ids=True)} if with_ids else {})


def decode_completion_logprobs(value: Mapping[str, Any], token_ids: Sequence[int] = ()) -> tuple[TokenLogprob, ...]:
    """The tokens again; from a server that sends no ``content``, as far as it tells.

    Args:
        token_ids: Of the same tokens, if the server told them.
    """
    if value.get("content") is not None:
        return decode_content(value["content"])
    tokens, logprobs = value.get("tokens") or [], value.get("token_logprobs") or []
    tops = value.get("top_logprobs") or [None] * len(tokens)
    ids = token_ids if len(token_ids) == len(tokens) else [UNKNOWN_ID] * len(tokens)
    return tuple(
        TokenLogprob(token_id, token, logprob, tuple(TokenLogprob(UNKNOWN_ID, *pair) for pair in (top or {}).items()))
        for token_id, token, logprob, top in zip(ids, tokens, logprobs, tops, strict=True)
        if logprob is not None
    )


def encode_prompt_logprobs(items: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: for each token itself first, then the most probable ones, by id.

    The rank of a token that is not among the most probable ones is null.
    """
    return [None if item is None else _encode_ranked(item) for item in items]


def decode_prompt_logprobs(value: Sequence[dict[str, Any] | None]) -> tuple[TokenLogprob | None, ...]:
    return tuple(_decode_ranked(item) if item else None for item in value)


def _encode_token(item: TokenLogprob, with_ids: bool) -> dict[str, Any]:
    # U+FFFD stands for a part of a character, whose bytes nobody knows here.
    octets = None if "\ufffd" in item.token else list(item.token.encode("utf-8"))
    encoded: dict[str, Any] = {"token": item.token, "logprob": item.logprob, "bytes": octets}
    return encoded | ({"token_id": item.token_id} if with_ids else {})


def _decode_token(item: dict[str, Any], top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    return TokenLogprob(item.get("token_id", UNKNOWN_ID), item["token"], item["logprob"], top)


def _encode_lists(items: Sequence[tuple[str, TokenLogprob | None]], offset: int) -> dict[str, Any]:
    """Parallel lists of tokens with what is known of each: nothing of a prompt's first, which follows nothing."""
    offsets = []
    for token, _ in items:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": [token for token, _ in items],
        "token_logprobs": [None if item is None else item.logprob for _, item in items],
        # OpenAI's promise: the token itself is always among them.
        "top_logprobs": [
            None if item is None else {top.token: top.logprob for top in item.top} | {item.token: item.logprob}
            for _, item in items
        ],
        "text_offset": offsets,
    }


def _encode_ranked(item: TokenLogprob) -> dict[str, Any]:
    ranks = {top.token_id: rank for rank, top in enumerate(item.top, start=1)}
    return {
        str(token.token_id): {
            "logprob": token.logprob,
            "rank": ranks.get(token.token_id),
            "decoded_token": token.token,
        }
        for token in (item, *(top for top in item.top if top.token_id != item.token_id))
    }


def _decode_ranked(entries: dict[str, Any]) -> TokenLogprob:
    tokens = [
        (entry.get("rank"), TokenLogprob(int(token_id), entry.get("decoded_token") or "", entry["logprob"]))
        for token_id, entry in entries.items()
    ]
    own = tokens[0][1]
    ranked = sorted((item for item in tokens if item[0] is not None), key=lambda item: item[0])
    return TokenLogprob(own.token_id, own.token, own.logprob, tuple(token for _, token in ranked))
