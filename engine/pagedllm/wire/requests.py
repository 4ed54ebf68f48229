"""Bodies of ``/v1/chat/completions`` and ``/v1/completions`` <-> GenerateRequest."""

from __future__ import annotations

import dataclasses
import uuid
from dataclasses import dataclass
from typing import Any

from ..api import GenerateRequest
from ..errors import InvalidRequestError
from .body import Body
from .formats import decode_structured_output, encode_structured_output
from .messages import decode_messages, encode_messages
from .sampling import Kind, decode_hints, decode_sampling, encode_hints, encode_sampling
from .tools import decode_tools, encode_tools

__all__ = ["HARMLESS_FIELDS", "GenerateCall", "decode_call", "encode_call", "kind_of"]

HARMLESS_FIELDS = ("metadata", "safety_identifier", "service_tier", "store", "user")
"""What clients send for their own or OpenAI's book-keeping: accepted, and changes nothing."""

# What OpenAI or vLLM offer and we do not, with the values that ask for nothing.
_NEUTRAL: tuple[tuple[str, tuple[Any, ...]], ...] = (
    *(("functions", ()), ("function_call", ("none", "auto")), ("modalities", (["text"],))),
    *(("audio", ()), ("prediction", ()), ("reasoning_effort", ()), ("verbosity", ()), ("web_search_options", ())),
    *(("suffix", ("",)), ("best_of", (1,)), ("skip_special_tokens", (True,)), ("use_beam_search", (False,))),
    *(("length_penalty", (1.0,)), ("include_stop_str_in_output", (False,)), ("add_special_tokens", (True,))),
    *(("spaces_between_special_tokens", (True, False)), ("truncate_prompt_tokens", ())),
    *(("chat_template", ()), ("chat_template_kwargs", ()), ("documents", ()), ("prompt_embeds", ())),
)


@dataclass(frozen=True, kw_only=True)
class GenerateCall:
    """What one body asks for: requests, and the form of their answer.

    Args:
        kind: Which API.
        requests: One for a chat; one for each prompt of a completion.
        model: The name that the client gave, if it gave one.
        request_id: The client's name for the call; of one request also its ``request_id``.
        stream: Answer by server-sent events.
        include_usage: End the stream with an event that holds the usage.
        continuous_usage: Put the usage so far into each event.
        return_token_ids: Tell token ids, of texts and of log probabilities.
        echo: Begin each text of a completion with its prompt.
    """

    kind: Kind
    requests: tuple[GenerateRequest, ...]
    model: str | None
    request_id: str
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    echo: bool = False


def kind_of(request: GenerateRequest) -> Kind:
    """Which API a request goes to."""
    return "completion" if request.messages is None else "chat"


def encode_call(request: GenerateRequest, *, model: str | None = None, stream: bool = False) -> dict[str, Any]:
    """The body that asks for this one request, and for all that it takes to rebuild its answer."""
    kind = kind_of(request)
    body: dict[str, Any] = {} if model is None else {"model": model}
    if request.messages is None:
        body["prompt"] = list(request.prompt) if isinstance(request.prompt, tuple) else request.prompt
    else:
        body["messages"] = encode_messages(request.messages)
    body |= encode_sampling(request.sampling, kind) | encode_hints(request.hints)
    body |= encode_tools(request) | encode_structured_output(request.structured_output, kind)
    if not request.add_generation_prompt:
        body["add_generation_prompt"] = False
    if request.continue_final_message:
        body["continue_final_message"] = True
    if request.parse_special_tokens is not None:
        body["parse_special_tokens"] = request.parse_special_tokens
    body |= {"request_id": request.request_id, "return_token_ids": True}
    return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


def decode_call(value: Any, kind: Kind | None = None) -> GenerateCall:
    """What a body asks for.

    Args:
        kind: Which API it was sent to; None: whichever its fields name, for endpoints that take both.

    Raises:
        InvalidRequestError: Naming the field that is wrong, unknown or not supported.
    """
    body = Body(value)
    kind = kind or ("chat" if "messages" in body else "completion")
    request_id = body.take_as(str, "request_id") or uuid.uuid4().hex
    if not request_id.isprintable() or len(request_id) > 128:
        raise InvalidRequestError.for_value("request_id", request_id, "must be up to 128 printable characters")
    model = body.take_as(str, "model")
    stream = body.take_as(bool, "stream", False)
    include_usage, continuous_usage = _decode_stream_options(body, stream)
    return_token_ids = body.take_as(bool, "return_token_ids", False)
    echo = body.take_as(bool, "echo", False) if kind == "completion" else False
    requests = _decode_requests(body, kind, request_id, echo)
    for name, neutral in _NEUTRAL:
        body.take_neutral(name, *neutral)
    body.close(harmless=HARMLESS_FIELDS)
    return GenerateCall(
        kind=kind,
        requests=requests,
        model=model,
        request_id=request_id,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        return_token_ids=return_token_ids,
        echo=echo,
    )


def _decode_stream_options(body: Body, stream: bool) -> tuple[bool, bool]:
    value = body.take("stream_options")
    if value is None:
        return False, False
    if not stream:
        raise InvalidRequestError("stream_options needs stream=true", param="stream_options")
    options = Body(value, "stream_options")
    include_usage = options.take_as(bool, "include_usage", False)
    continuous_usage = options.take_as(bool, "continuous_usage_stats", False)
    options.take_as(bool, "include_obfuscation")  # a wish of OpenAI's clients about padding, which we never add
    options.close()
    return include_usage, include_usage and continuous_usage


def _decode_requests(body: Body, kind: Kind, request_id: str, echo: bool) -> tuple[GenerateRequest, ...]:
    prompts: list[dict[str, Any]]
    if kind == "chat":
        messages, breakpoints = decode_messages(body.take("messages"))
        prompts = [{"messages": messages}]
    else:
        breakpoints = ()
        prompts = [{"prompt": prompt} for prompt in _decode_prompts(body.take("prompt"))]
    sampling, hints = decode_sampling(body, kind), decode_hints(body, breakpoints)
    if echo and sampling.logprobs is not None:
        sampling = dataclasses.replace(sampling, prompt_logprobs=sampling.logprobs)
    options: dict[str, Any] = {"parse_special_tokens": body.take_as(bool, "parse_special_tokens")}
    options["add_generation_prompt"] = body.take_as(bool, "add_generation_prompt", True)
    options["continue_final_message"] = body.take_as(bool, "continue_final_message", False)
    options |= {**decode_tools(body), "structured_output": decode_structured_output(body)}
    return tuple(
        GenerateRequest(
            sampling=sampling,
            hints=hints,
            request_id=request_id if len(prompts) == 1 else f"{request_id}-{index}",
            **prompt,
            **options,
        )
        for index, prompt in enumerate(prompts)
    )


def _decode_prompts(value: Any) -> list[str | list[int]]:
    """One or more prompts: a text, token ids, or a list of either."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return [value]
        if all(isinstance(item, str) for item in value) or all(isinstance(item, list) for item in value):
            return value
    allowed = "must be a text, a list of token ids, or a list of one or more of either"
    raise InvalidRequestError.for_value("prompt", value, allowed)
