"""RequestOutput <-> ``chat.completion`` and ``text_completion`` objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..api import Choice, HintOutcome, RequestOutput, Timings, TokenLogprob, Usage
from ..errors import EngineError
from .calls import decode_calls, encode_calls
from .logprobs import (
    Echo,
    decode_completion_logprobs,
    decode_content,
    decode_prompt_logprobs,
    encode_completion_logprobs,
    encode_content,
    encode_prompt_logprobs,
)
from .records import from_record, to_record
from .sampling import Kind

__all__ = [
    "EXTENSION",
    "AnswerForm",
    "decode_outputs",
    "decode_reasoning",
    "decode_usage",
    "encode_outputs",
    "encode_usage",
    "end_with_calls",
    "finish_record",
    "read_finish_record",
]

EXTENSION = "pagedllm"
"""The key of what OpenAI's objects have no place for."""

_PREFIXES: dict[Kind, str] = {"chat": "chatcmpl-", "completion": "cmpl-"}


@dataclass(frozen=True, kw_only=True)
class AnswerForm:
    """How to write an answer.

    Args:
        kind: Which API's objects.
        request_id: Of the call; the object's id is made of it.
        model: As the answer names it.
        created: Unix time in seconds.
        return_token_ids: Add token ids to texts and log probabilities.
    """

    kind: Kind
    request_id: str
    model: str
    created: int
    return_token_ids: bool = False

    def head(self, *, is_chunk: bool) -> dict[str, Any]:
        """The fields that every object of the answer begins with."""
        names: dict[Kind, str] = {"chat": "chat.completion", "completion": "text_completion"}
        suffix = ".chunk" if is_chunk and self.kind == "chat" else ""
        return {
            "id": _PREFIXES[self.kind] + self.request_id,
            "object": names[self.kind] + suffix,
            "created": self.created,
            "model": self.model,
        }


def encode_outputs(form: AnswerForm, outputs: Sequence[RequestOutput], echoes: Sequence[Echo] = ()) -> dict[str, Any]:
    """One object for all requests of a call; the choices of each follow those of the one before.

    Args:
        echoes: One for each request whose texts begin with its prompt.
    """
    choices: list[dict[str, Any]] = []
    for place, output in enumerate(outputs):
        for choice in output.choices:
            encoded = _encode_choice(form, choice, len(choices), echoes[place] if echoes else None)
            if form.kind == "completion" and output.prompt_logprobs is not None:
                encoded["prompt_logprobs"] = encode_prompt_logprobs(output.prompt_logprobs)
            choices.append(encoded)
    body = form.head(is_chunk=False) | {"choices": choices, "usage": encode_usage([item.usage for item in outputs])}
    if form.kind == "chat" and outputs[0].prompt_logprobs is not None:
        body["prompt_logprobs"] = encode_prompt_logprobs(outputs[0].prompt_logprobs)
    records = [finish_record(item.request_id, item.usage, item.timings, item.hints) for item in outputs]
    return body | {EXTENSION: {"requests": records}}


def decode_outputs(body: Mapping[str, Any], *, request_id: str | None = None) -> list[RequestOutput]:
    """The outputs again, one for each request of the call.

    Args:
        request_id: Of the answer's only request, whatever the server calls it.

    Raises:
        EngineError: The body is no such object.
    """
    try:
        records = _records(body)
        choices = body["choices"]
        num_choices = len(choices) // len(records)
        return [
            _decode_output(body, choices[place * num_choices : (place + 1) * num_choices], record, request_id)
            for place, record in enumerate(records)
        ]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise EngineError(f"the server's answer is no completion: {error!r}") from error


def encode_usage(usages: Sequence[Usage]) -> dict[str, Any]:
    """OpenAI's ``usage`` of all requests of a call together; ``cache_creation_tokens`` is ours."""
    prompt_tokens, completion_tokens = (
        sum(item.prompt_tokens for item in usages),
        sum(item.completion_tokens for item in usages),
    )
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(item.cached_tokens for item in usages),
            "cache_creation_tokens": sum(item.cache_creation_tokens for item in usages),
        },
        "completion_tokens_details": {"reasoning_tokens": sum(item.reasoning_tokens for item in usages)},
    }


def decode_usage(value: Mapping[str, Any] | None) -> Usage:
    value = value or {}
    details = value.get("prompt_tokens_details") or {}
    completion_details = value.get("completion_tokens_details") or {}
    return Usage(
        prompt_tokens=value.get("prompt_tokens") or 0,
        completion_tokens=value.get("completion_tokens") or 0,
        cached_tokens=details.get("cached_tokens") or 0,
        cache_creation_tokens=details.get("cache_creation_tokens") or 0,
        reasoning_tokens=completion_details.get("reasoning_tokens") or 0,
    )


def decode_reasoning(message: Mapping[str, Any]) -> str:
    """The thoughts in an answer or in a piece of one, under either of vLLM's names for them."""
    return message.get("reasoning_content") or message.get("reasoning") or ""


def end_with_calls(finish_reason: Any, *, has_calls: bool) -> Any:
    """Why an answer of another server ended: of calls that were asked for, many say ``"stop"``."""
    return "tool_calls" if has_calls and finish_reason == "stop" else finish_reason


def finish_record(
    request_id: str, usage: Usage, timings: Timings | None, hints: Sequence[HintOutcome]
) -> dict[str, Any]:
    """What the extension tells about a request that has ended."""
    return {
        "request_id": request_id,
        "usage": encode_usage([usage]),
        "timings": None if timings is None else to_record(timings),
        "hints": [to_record(item) for item in hints],
    }


def read_finish_record(record: Mapping[str, Any]) -> tuple[Usage, Timings, tuple[HintOutcome, ...]]:
    """Its usage, timings and hints; a server that does not tell timings leaves them 0."""
    timings = record.get("timings")
    return (
        decode_usage(record.get("usage")),
        Timings(queue_s=0.0, ttft_s=0.0, total_s=0.0) if timings is None else from_record(Timings, timings),
        tuple(from_record(HintOutcome, item) for item in record.get("hints") or ()),
    )


def _records(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the extension says of each request; without it, the whole answer is one request's."""
    extension = body.get(EXTENSION)
    return extension["requests"] if extension else [{"usage": body.get("usage")}]


def _encode_choice(form: AnswerForm, choice: Choice, index: int, echo: Echo | None) -> dict[str, Any]:
    encoded: dict[str, Any] = {"index": index}
    if form.kind == "chat":
        encoded["message"] = _encode_message(choice)
    else:
        encoded["text"] = (echo.text if echo else "") + choice.text
    encoded["logprobs"] = encode_logprobs(form, choice.logprobs, echo=echo)
    encoded |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
    return encoded | ({"token_ids": list(choice.token_ids)} if form.return_token_ids else {})


def _encode_message(choice: Choice) -> dict[str, Any]:
    """A chat's answer. OpenAI's content is null where there are only calls."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message |= {"content": choice.text or None, "tool_calls": encode_calls(choice.tool_calls)}
    return message


def encode_logprobs(
    form: AnswerForm, logprobs: Sequence[TokenLogprob] | None, *, offset: int = 0, echo: Echo | None = None
) -> dict[str, Any] | None:
    """The field ``logprobs`` of a choice."""
    if logprobs is None:
        return None
    if form.kind == "chat":
        return {"content": encode_content(logprobs, with_ids=form.return_token_ids), "refusal": None}
    return encode_completion_logprobs(logprobs, offset=offset, with_ids=form.return_token_ids, echo=echo)


def decode_logprobs(value: Mapping[str, Any] | None, token_ids: Sequence[int]) -> tuple[TokenLogprob, ...] | None:
    """Log probabilities of a choice, in the form of either API."""
    if value is None:
        return None
    if "tokens" in value:
        return decode_completion_logprobs(value, token_ids)
    return decode_content(value.get("content") or ())


def _decode_output(
    body: Mapping[str, Any], choices: Sequence[Any], record: Mapping[str, Any], request_id: str | None
) -> RequestOutput:
    usage, timings, hints = read_finish_record(record)
    prompt_logprobs = body.get("prompt_logprobs") or choices[0].get("prompt_logprobs")
    return RequestOutput(
        request_id=request_id or record.get("request_id") or str(body["id"]),
        choices=tuple(_decode_choice(choice, index, is_ours=EXTENSION in body) for index, choice in enumerate(choices)),
        usage=usage,
        timings=timings,
        prompt_logprobs=None if prompt_logprobs is None else decode_prompt_logprobs(prompt_logprobs),
        hints=hints,
    )


def _decode_choice(choice: Mapping[str, Any], index: int, *, is_ours: bool) -> Choice:
    message = choice.get("message") or {"content": choice.get("text")}
    token_ids = tuple(choice.get("token_ids") or ())
    calls = decode_calls(message.get("tool_calls"))
    return Choice(
        text=message.get("content") or "",
        token_ids=token_ids,
        finish_reason=end_with_calls(choice["finish_reason"], has_calls=bool(calls) and not is_ours),
        reasoning=decode_reasoning(message),
        tool_calls=calls,
        index=index,
        stop_reason=choice.get("stop_reason"),
        logprobs=decode_logprobs(choice.get("logprobs"), token_ids),
    )
