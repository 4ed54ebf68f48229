"""Random values of the engine's types, for tests of the wire format."""

from __future__ import annotations

from hypothesis import strategies as st

from pagedllm.api import (
    CacheHints,
    Choice,
    Chunk,
    GenerateRequest,
    HintOutcome,
    Message,
    RequestOutput,
    Retain,
    SamplingParams,
    StructuredOutput,
    Timings,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolCallDelta,
    Usage,
)

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
names = st.text(st.characters(categories=("L", "N")), min_size=1, max_size=12)
token_ids = st.integers(0, 50_000)
seconds = st.floats(0, 1e6)
counts = st.integers(0, 10_000)


def maybe(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.none() | strategy


samplings = st.builds(
    SamplingParams,
    n=st.integers(1, 8),
    max_tokens=maybe(st.integers(10, 5000)),
    min_tokens=st.integers(0, 10),
    temperature=maybe(st.floats(0, 5)),
    top_p=maybe(st.floats(0.01, 1)),
    top_k=maybe(st.integers(-1, 100)),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 10),
    logit_bias=st.dictionaries(token_ids, st.floats(-100, 100), max_size=3),
    seed=maybe(st.integers(-(2**63), 2**64 - 1)),
    stop=st.lists(texts.filter(bool), max_size=3),
    stop_token_ids=st.lists(token_ids, max_size=3),
    ignore_eos=st.booleans(),
    logprobs=maybe(st.integers(0, 20)),
    prompt_logprobs=maybe(st.integers(0, 20)),
)

retains = st.builds(Retain, num_tokens=maybe(st.integers(1, 999)), ttl_s=st.floats(1, 9999)) | st.builds(
    Retain, message_index=st.integers(0, 9), num_chars=maybe(st.integers(0, 99)), ttl_s=st.floats(1, 9999)
)
hints = st.builds(
    CacheHints,
    salt=maybe(names),
    retain=st.lists(retains, max_size=3).map(tuple),
    release=st.booleans(),
    warm=st.booleans(),
    priority=st.integers(-100, 100),
    prefix_key=maybe(names),
)

tool_calls = st.builds(ToolCall, id=names, name=names, arguments=texts)
messages = (
    st.builds(Message, role=st.sampled_from(["system", "user", "developer"]), content=texts)
    | st.builds(Message, role=st.just("assistant"), content=texts, tool_calls=st.lists(tool_calls, max_size=2))
    | st.builds(Message, role=st.just("tool"), content=texts, tool_call_id=maybe(names))
)
schemas = st.fixed_dictionaries(
    {"type": st.just("object")},
    optional={"properties": st.dictionaries(names, st.just({"enum": [1, None, "größe", 0.5]}), max_size=2)},
)
structures = (
    st.builds(StructuredOutput, json_schema=schemas | st.just(True))
    | st.builds(StructuredOutput, regex=texts.filter(bool))
    | st.builds(StructuredOutput, choice=st.lists(texts.filter(bool), min_size=1, max_size=3))
    | st.builds(StructuredOutput, grammar=texts.filter(bool))
)
tools = st.builds(Tool, name=names, description=texts, parameters=maybe(schemas), strict=st.booleans())


@st.composite
def formed_chats(draw: st.DrawFn) -> GenerateRequest:
    """Chats with tools, a structure, or both."""
    offered = draw(st.lists(tools, max_size=2, unique_by=lambda tool: tool.name).map(tuple))
    choices = ["auto", "none", *(["required", offered[0].name] if offered else [])]
    choice = draw(st.sampled_from(choices))
    return GenerateRequest(
        messages=draw(st.lists(messages, min_size=1, max_size=2).map(tuple)),
        request_id=draw(names),
        tools=offered,
        tool_choice=choice,
        parallel_tool_calls=draw(maybe(st.booleans())),
        structured_output=draw(maybe(structures)) if choice in ("auto", "none") else None,
    )


formed_prompts = st.builds(
    GenerateRequest, prompt=texts.filter(bool), request_id=names, structured_output=maybe(structures)
)
chats = st.builds(
    GenerateRequest,
    messages=st.lists(messages, min_size=1, max_size=4).map(tuple),
    sampling=samplings,
    hints=hints,
    request_id=names,
    parse_special_tokens=maybe(st.booleans()),
    add_generation_prompt=st.booleans(),
)
prompts = st.builds(
    GenerateRequest,
    prompt=texts.filter(bool),
    sampling=samplings,
    hints=hints,
    request_id=names,
    parse_special_tokens=maybe(st.booleans()),
)
id_prompts = st.builds(
    GenerateRequest,
    prompt=st.lists(token_ids, min_size=1, max_size=5).map(tuple),
    sampling=samplings,
    hints=hints,
    request_id=names,
)
requests = chats | prompts | id_prompts | formed_chats() | formed_prompts

usages = st.builds(
    Usage,
    prompt_tokens=counts,
    completion_tokens=counts,
    cached_tokens=counts,
    cache_creation_tokens=counts,
    reasoning_tokens=counts,
)
timings = st.builds(Timings, queue_s=seconds, ttft_s=seconds, total_s=seconds)
outcomes = st.builds(
    HintOutcome,
    hint=st.sampled_from(["retain", "release", "warm", "priority"]),
    outcome=st.sampled_from(["accepted", "clipped", "deferred", "rejected", "missing"]),
    num_tokens=counts,
    reason=texts,
)
finish_reasons = st.sampled_from(["stop", "length", "tool_calls", "abort", "error"])
stop_reasons = maybe(texts | token_ids)


@st.composite
def logprobs(draw: st.DrawFn) -> TokenLogprob:
    """A token and its most probable rivals; where it is among them it is the same token."""
    ids = draw(st.lists(token_ids, min_size=1, max_size=4, unique=True))
    tokens = [TokenLogprob(token_id, draw(texts), draw(st.floats(-99, 0))) for token_id in ids]
    own = tokens[0]
    top = draw(st.permutations(tokens)) if draw(st.booleans()) else tokens[1:]
    return TokenLogprob(own.token_id, own.token, own.logprob, tuple(top))


prompt_logprobs = maybe(st.lists(logprobs(), min_size=1, max_size=3).map(lambda items: (None, *items)))


@st.composite
def outputs(draw: st.DrawFn, num_choices: int | None = None, *, is_chat: bool = False) -> RequestOutput:
    """An answer; only a chat's has thoughts and calls."""
    choices = []
    for index in range(num_choices or draw(st.integers(1, 3))):
        items = draw(maybe(st.lists(logprobs(), max_size=3)))
        choices.append(
            Choice(
                text=draw(texts),
                token_ids=tuple(draw(st.lists(token_ids, max_size=4))),
                finish_reason=draw(finish_reasons),
                index=index,
                stop_reason=draw(stop_reasons),
                logprobs=None if items is None else tuple(items),
                reasoning=draw(texts) if is_chat else "",
                tool_calls=tuple(draw(st.lists(tool_calls, max_size=2))) if is_chat else (),
            )
        )
    return RequestOutput(
        request_id=draw(names),
        choices=tuple(choices),
        usage=draw(usages),
        timings=draw(timings),
        prompt_logprobs=draw(prompt_logprobs),
        hints=tuple(draw(st.lists(outcomes, max_size=2))),
    )


@st.composite
def call_deltas(draw: st.DrawFn, num_begun: int) -> tuple[ToolCallDelta, ...]:
    """What is new of a choice's calls, of which some have begun: more of the last one, or another, or both."""
    deltas = []
    if num_begun and draw(st.booleans()):
        deltas.append(ToolCallDelta(index=num_begun - 1, arguments=draw(texts)))
    if draw(st.booleans()):
        deltas.append(ToolCallDelta(index=num_begun, id=draw(names), name=draw(names), arguments=draw(texts)))
    return tuple(deltas)


@st.composite
def chunk_lists(draw: st.DrawFn, *, is_chat: bool = False) -> tuple[list[Chunk], int]:
    """The chunks of a request in the order of a stream, and how many choices they are of."""
    num_choices = draw(st.integers(1, 3))
    with_logprobs = draw(st.booleans())
    places = [index for index in range(num_choices) for _ in range(draw(st.integers(1, 3)))]
    places = draw(st.permutations(places))
    chunks: list[Chunk] = []
    num_begun = [0] * num_choices
    for place, index in enumerate(places):
        is_end, is_last = index not in places[place + 1 :], place == len(places) - 1
        ids = draw(st.lists(token_ids, max_size=2))
        calls = draw(call_deltas(num_begun[index])) if is_chat else ()
        num_begun[index] += sum(delta.name is not None for delta in calls)
        chunks.append(
            Chunk(
                request_id="r",
                text=draw(texts),
                token_ids=tuple(ids),
                index=index,
                reasoning=draw(texts) if is_chat else "",
                tool_calls=calls,
                logprobs=tuple(draw(logprobs()) for _ in ids) if with_logprobs else None,
                finish_reason=draw(finish_reasons) if is_end else None,
                stop_reason=draw(stop_reasons) if is_end else None,
                prompt_logprobs=draw(prompt_logprobs) if is_last else None,
                usage=draw(usages) if is_last else None,
                timings=draw(timings) if is_last else None,
                hints=tuple(draw(st.lists(outcomes, max_size=2))) if is_last else (),
            )
        )
    return chunks, num_choices
