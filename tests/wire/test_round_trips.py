"""What one direction writes, the other reads as the same value, through real JSON text."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import wire_strategies as some
from hypothesis import given
from hypothesis import strategies as st

from pagedllm.api import Chunk, EngineStats, GenerateRequest, Health, ModelInfo, RequestOutput, Usage
from pagedllm.errors import (
    ContextLengthError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    PagedLLMError,
    QueueFullError,
    QueueTimeoutError,
)
from pagedllm.wire import (
    AnswerForm,
    StreamDecoder,
    StreamEncoder,
    decode_call,
    decode_count,
    decode_detokenize_call,
    decode_error,
    decode_health,
    decode_match,
    decode_models,
    decode_outputs,
    decode_stats,
    decode_text,
    decode_tokenize_call,
    decode_tokens,
    dump_json,
    encode_call,
    encode_count_call,
    encode_detokenize_call,
    encode_error,
    encode_health,
    encode_match,
    encode_models,
    encode_outputs,
    encode_stats,
    encode_text,
    encode_tokenize_call,
    encode_tokens,
    kind_of,
    parse_json,
)


def sent(value: Any) -> Any:
    """The value after its way over the wire."""
    return parse_json(dump_json(value))


def form(kind: Any) -> AnswerForm:
    return AnswerForm(kind=kind, request_id="r", model="m", created=1, return_token_ids=True)


@given(request=some.requests, stream=st.booleans())
def test_request(request: GenerateRequest, stream: bool) -> None:
    """A remote engine's request must arrive as the one that a local engine would have got."""
    call = decode_call(sent(encode_call(request, model="m", stream=stream)), kind_of(request))
    assert call.requests == (request,)
    assert (call.model, call.stream, call.include_usage) == ("m", stream, stream)
    assert call.return_token_ids


@given(request=some.requests)
def test_kind_is_found_by_the_fields(request: GenerateRequest) -> None:
    """The cache endpoints take both kinds of bodies."""
    assert decode_call(sent(encode_call(request))).requests == (request,)


@pytest.mark.parametrize("kind", ["chat", "completion"])
@given(data=st.data())
def test_output(kind: str, data: st.DataObject) -> None:
    """An answer must not lose a token id, a log probability or a figure on its way."""
    output = data.draw(some.outputs(is_chat=kind == "chat"))
    assert decode_outputs(sent(encode_outputs(form(kind), [output]))) == [output]


@given(data=st.data())
def test_outputs_of_a_call_with_many_prompts(data: st.DataObject) -> None:
    """Choices of several prompts lie in one list and must come back to their own."""
    outputs = [data.draw(some.outputs(num_choices=2)) for _ in range(3)]
    assert decode_outputs(sent(encode_outputs(form("completion"), outputs))) == outputs


@pytest.mark.parametrize("kind", ["chat", "completion"])
@given(data=st.data())
def test_chunks(kind: str, data: st.DataObject) -> None:
    """A remote stream must have the chunks of a local one: the same, but for ends parted from their last piece."""
    chunks, num_choices = data.draw(some.chunk_lists(is_chat=kind == "chat"))
    encoder = StreamEncoder(form(kind), num_choices=num_choices)
    decoder = StreamDecoder("r", num_choices=num_choices)
    for chunk in chunks:
        decoded = [item for event in encoder.encode(chunk) for item in decoder.decode(sent(event))]
        if len(decoded) == 2:
            piece, end = decoded
            assert (piece.finish_reason, end.text, end.token_ids) == (None, "", ())
            assert (end.reasoning, end.tool_calls) == ("", ())
            names = ("text", "token_ids", "logprobs", "reasoning", "tool_calls")
            decoded = [replace(end, **{name: getattr(piece, name) for name in names})]
        assert decoded == [chunk]
    assert decoder.has_ended
    assert decoder.finish() == []


@given(drawn=some.chunk_lists())
def test_chunks_without_extension(drawn: tuple[list[Chunk], int]) -> None:
    """A server that knows only OpenAI's fields tells the usage after the last text; the last chunk needs it."""
    chunks, num_choices = drawn
    encoder = StreamEncoder(form("chat"), num_choices=num_choices)
    decoder = StreamDecoder("r", num_choices=num_choices)
    decoded = []
    for event in [*(event for chunk in chunks for event in encoder.encode(chunk)), encoder.usage_event()]:
        decoded += decoder.decode(sent({name: value for name, value in event.items() if name != "pagedllm"}))
    assert decoded[-1].usage == chunks[-1].usage
    assert all(chunk.usage is None for chunk in decoded[:-1])
    for index in range(num_choices):
        texts = ["".join(c.text for c in items if c.index == index) for items in (chunks, decoded)]
        assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("top_p=2: must be in (0, 1]", param="top_p"),
        ContextLengthError("1025 tokens, but max_model_len is 1024", param="prompt"),
    ],
)
def test_request_errors(error: InvalidRequestError) -> None:
    """A caller that catches an error class must not care where the engine is."""
    encoded = encode_error(error)
    decoded = decode_error(encoded.status, sent(encoded.body()))
    assert (type(decoded), str(decoded), encoded.status) == (type(error), str(error), 400)
    assert isinstance(decoded, InvalidRequestError)
    assert decoded.param == error.param


@pytest.mark.parametrize("kind", [QueueFullError, QueueTimeoutError, EngineClosedError, EngineDeadError])
def test_engine_errors(kind: type[PagedLLMError]) -> None:
    """Such an error comes back as its class, with a fixed text: what it says may be none of a client's business."""
    encoded = encode_error(kind("secret"))
    assert encoded.status == 503
    assert "secret" not in str(encoded.body())
    assert ("Retry-After" in encoded.all_headers()) == (kind in (QueueFullError, QueueTimeoutError))
    assert type(decode_error(503, sent(encoded.body()))) is kind


@pytest.mark.parametrize("error", [RuntimeError("secret at 0x7f"), PagedLLMError("secret at 0x7f")])
def test_unexpected_errors_say_nothing(error: Exception) -> None:
    """The text of a fault of ours may hold an address or a path."""
    encoded = encode_error(error)
    assert encoded.status == 500
    assert "secret" not in str(encoded.body())


INFO = ModelInfo(
    model="m",
    architecture="llama",
    dtype="float32",
    kernels="cpu",
    vocab_size=9,
    max_model_len=8,
    eos_token_ids=(1, 2),
    has_chat_template=True,
    block_size=16,
    num_blocks=4,
    kv_bytes_per_token=64,
)


def test_models() -> None:
    """A remote engine's model_info is the server's."""
    body = sent(encode_models(INFO, name="served", created=1))
    assert decode_models(body) == decode_models(body, name="served") == INFO
    assert body["data"][0]["id"] == "served"


def test_stats() -> None:
    names = list(EngineStats.__dataclass_fields__)
    stats = EngineStats(**{name: place for place, name in enumerate(names)})  # type: ignore[arg-type]
    assert decode_stats(sent(encode_stats(stats)) | {"of_a_newer_server": 1}) == stats


def test_health() -> None:
    for status, health in ((200, Health(ok=True)), (503, Health(ok=False, reason="dead"))):
        assert decode_health(status, sent(encode_health(health))) == health


@given(text=some.texts, flag=st.booleans(), ids=st.lists(some.token_ids))
def test_tokens(text: str, flag: bool, ids: list[int]) -> None:
    call = decode_tokenize_call(sent(encode_tokenize_call(text, add_special_tokens=flag)))
    assert (call.text, call.add_special_tokens, call.request) == (text, flag, None)
    assert decode_tokens(sent(encode_tokens(count=len(ids), max_model_len=1, token_ids=ids))) == ids
    assert decode_count(sent(encode_tokens(count=3, max_model_len=1))) == 3
    assert decode_detokenize_call(sent(encode_detokenize_call(ids))) == ids
    assert decode_text(sent(encode_text(text))) == text
    assert decode_match(sent(encode_match(len(ids)))) == len(ids)


@given(request=some.requests)
def test_count_call(request: GenerateRequest) -> None:
    """Counting must look at the prompt that generating would compute."""
    call = decode_tokenize_call(sent(encode_count_call(request)))
    assert call.request is not None
    for name in ("prompt", "messages", "parse_special_tokens", "add_generation_prompt", "continue_final_message"):
        assert getattr(call.request, name) == getattr(request, name)


@given(usages=st.lists(some.usages, min_size=1, max_size=3), data=st.data())
def test_usage_of_a_call_is_the_sum(usages: list[Usage], data: st.DataObject) -> None:
    """A client is billed by the call."""
    output = data.draw(some.outputs(num_choices=1))
    outputs: list[RequestOutput] = [replace(output, usage=usage) for usage in usages]
    usage = sent(encode_outputs(form("completion"), outputs))["usage"]
    assert usage["prompt_tokens"] == sum(item.prompt_tokens for item in usages)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == sum(item.cached_tokens for item in usages)


@given(drawn=some.chunk_lists())
def test_events_of_a_choice(drawn: tuple[list[Chunk], int]) -> None:
    """Clients expect the role once, and finish_reason null until a last event, which has no text."""
    chunks, num_choices = drawn
    encoder = StreamEncoder(form("chat"), num_choices=num_choices)
    choices = [event["choices"][0] for chunk in chunks for event in encoder.encode(chunk)]
    for _, group in groupby(sorted(choices, key=lambda item: item["index"]), key=lambda item: item["index"]):
        events = list(group)
        assert [event["delta"].get("role") for event in events] == ["assistant"] + [None] * (len(events) - 1)
        assert all(event["finish_reason"] is None for event in events[:-1])
        assert events[-1]["finish_reason"] is not None
        assert not events[-1]["delta"].get("content")
