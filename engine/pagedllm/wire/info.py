"""The endpoints beside generation <-> JSON: models, health, tokens, cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..api import EngineStats, GenerateRequest, Health, ModelInfo
from ..errors import EngineError, InvalidRequestError
from .body import Body
from .outputs import EXTENSION
from .records import from_record, to_record
from .requests import decode_call, encode_call

__all__ = [
    "TokenizeCall",
    "decode_count",
    "decode_detokenize_call",
    "decode_health",
    "decode_match",
    "decode_models",
    "decode_stats",
    "decode_text",
    "decode_tokenize_call",
    "decode_tokens",
    "encode_count_call",
    "encode_detokenize_call",
    "encode_health",
    "encode_match",
    "encode_models",
    "encode_stats",
    "encode_text",
    "encode_tokenize_call",
    "encode_tokens",
]


# --- /v1/models ---


def encode_models(info: ModelInfo, *, name: str, created: int) -> dict[str, Any]:
    """The list of the one model.

    Args:
        name: By which requests ask for it.
    """
    entry = {"id": name, "object": "model", "created": created, "owned_by": "pagedllm"}
    entry |= {"root": info.model, "parent": None, "max_model_len": info.max_model_len, EXTENSION: to_record(info)}
    return {"object": "list", "data": [entry]}


def decode_models(body: Mapping[str, Any], *, name: str | None = None) -> ModelInfo:
    """What the server tells about a model; of other servers than ours that is its name and at most its length.

    Args:
        name: Which; None: the first.

    Raises:
        EngineError: It is not there.
    """
    entries = body.get("data") or []
    entry = next((item for item in entries if name in (None, item.get("id"))), None)
    if entry is None:
        raise EngineError(f"the server has no model {name!r}; it has {[item.get('id') for item in entries]}"[:300])
    if EXTENSION in entry:
        return from_record(ModelInfo, entry[EXTENSION])
    return ModelInfo(
        model=entry["id"],
        architecture="unknown",
        dtype="unknown",
        kernels="unknown",
        vocab_size=0,
        max_model_len=entry.get("max_model_len") or 0,
        eos_token_ids=(),
        has_chat_template=True,
        block_size=0,
        num_blocks=0,
        kv_bytes_per_token=0,
    )


# --- /health ---


def encode_health(health: Health) -> dict[str, Any]:
    return {"status": "ok"} if health.ok else {"status": "unavailable", "reason": health.reason}


def decode_health(status: int, body: Any) -> Health:
    """vLLM answers with the status alone."""
    reason = body.get("reason") if isinstance(body, Mapping) else None
    return Health(ok=status == 200, reason="" if status == 200 else str(reason or f"status {status}"))


# --- /tokenize and /detokenize ---


@dataclass(frozen=True, kw_only=True)
class TokenizeCall:
    """What a body of ``/tokenize`` asks for: the token ids of a text, or the number of tokens of a request's prompt.

    Exactly one of ``text`` and ``request`` is given.
    """

    text: str | None = None
    add_special_tokens: bool = True
    request: GenerateRequest | None = None
    model: str | None = None


def encode_tokenize_call(text: str, *, add_special_tokens: bool = True) -> dict[str, Any]:
    return {"prompt": text, "add_special_tokens": add_special_tokens}


def encode_count_call(request: GenerateRequest) -> dict[str, Any]:
    """Asks for the number of tokens of a request's prompt; ``count_only`` is ours, the rest is vLLM's."""
    names = (
        *("prompt", "messages", "add_generation_prompt", "continue_final_message", "parse_special_tokens"),
        *("tools", "tool_choice"),
    )
    body = encode_call(request)
    return {name: body[name] for name in names if name in body} | {"count_only": True}


def decode_tokenize_call(value: Any) -> TokenizeCall:
    body = Body(value)
    model = body.take_as(str, "model")
    count_only = body.take_as(bool, "count_only", False)
    body.take_neutral("return_token_strs", False)
    if count_only or "messages" in body:
        rest = {name: item for name, item in dict(value).items() if name not in ("count_only", "return_token_strs")}
        requests = decode_call(rest).requests
        if len(requests) != 1:
            raise InvalidRequestError("prompt must be one prompt here", param="prompt")
        return TokenizeCall(request=requests[0], model=model)
    text = body.take("prompt")
    if not isinstance(text, str):
        raise InvalidRequestError.for_value("prompt", text, "must be a text")
    add_special_tokens = body.take_as(bool, "add_special_tokens", True)
    body.close()
    return TokenizeCall(text=text, add_special_tokens=add_special_tokens, model=model)


def encode_tokens(*, count: int, max_model_len: int, token_ids: Sequence[int] | None = None) -> dict[str, Any]:
    """The answer; without ``token_ids`` it is only the count."""
    tokens = None if token_ids is None else list(token_ids)
    return {"count": count, "max_model_len": max_model_len, "tokens": tokens}


def decode_tokens(body: Mapping[str, Any]) -> list[int]:
    tokens = body.get("tokens")
    if not isinstance(tokens, list):
        raise EngineError("the server's answer holds no tokens")
    return tokens


def decode_count(body: Mapping[str, Any]) -> int:
    count = body.get("count")
    if not isinstance(count, int):
        raise EngineError("the server's answer holds no count")
    return count


def encode_detokenize_call(token_ids: Sequence[int]) -> dict[str, Any]:
    return {"tokens": list(token_ids)}


def decode_detokenize_call(value: Any) -> list[int]:
    body = Body(value)
    body.take_as(str, "model")
    token_ids = body.take("tokens")
    body.close()
    if not isinstance(token_ids, list) or any(isinstance(x, bool) or not isinstance(x, int) for x in token_ids):
        raise InvalidRequestError.for_value("tokens", token_ids, "must be a list of token ids")
    return token_ids


def encode_text(text: str) -> dict[str, Any]:
    return {"prompt": text}


def decode_text(body: Mapping[str, Any]) -> str:
    text = body.get("prompt")
    if not isinstance(text, str):
        raise EngineError("the server's answer holds no text")
    return text


# --- /v1/cache ---


def encode_match(num_tokens: int) -> dict[str, Any]:
    """The answer of ``/v1/cache/match``; it asks with the body that would ask for the answer itself."""
    return {"num_tokens": num_tokens}


def decode_match(body: Mapping[str, Any]) -> int:
    num_tokens = body.get("num_tokens")
    if not isinstance(num_tokens, int):
        raise EngineError("the server's answer holds no number of tokens")
    return num_tokens


def encode_stats(stats: EngineStats) -> dict[str, Any]:
    return to_record(stats)


def decode_stats(body: Mapping[str, Any]) -> EngineStats:
    return from_record(EngineStats, body)
