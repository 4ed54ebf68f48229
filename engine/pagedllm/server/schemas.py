"""The bodies of requests as OpenAPI describes them. The wire module checks them; this is for readers and tools."""

from __future__ import annotations

from typing import Any

__all__ = ["CHAT", "COMPLETION", "DETOKENIZE", "EITHER", "NOTHING", "TOKENIZE", "describe"]

_Schema = dict[str, Any]


def _object(properties: _Schema, *required: str, closed: bool = True) -> _Schema:
    schema: _Schema = {"type": "object", "properties": properties}
    if closed:
        schema["additionalProperties"] = False
    return schema | ({"required": list(required)} if required else {})


def _number(minimum: float, maximum: float) -> _Schema:
    return {"type": ["number", "null"], "minimum": minimum, "maximum": maximum}


def _integer(minimum: int, maximum: int) -> _Schema:
    return {"type": ["integer", "null"], "minimum": minimum, "maximum": maximum}


def _list(items: _Schema, minimum: int = 0, maximum: int = 128) -> _Schema:
    return {"type": "array", "items": items, "minItems": minimum, "maxItems": maximum}


_TEXT: _Schema = {"type": "string"}
_FLAG: _Schema = {"type": ["boolean", "null"]}
_TOKEN_ID: _Schema = {"type": "integer", "minimum": 0}
_COUNT_LIMIT = 2**31 - 1

_TTL: _Schema = {"anyOf": [{"enum": ["5m", "1h"]}, {"type": "number", "exclusiveMinimum": 0, "maximum": 604800}]}
_CACHE_CONTROL = _object({"type": {"const": "ephemeral"}, "ttl": _TTL}, "type")
_PART = _object({"type": {"const": "text"}, "text": _TEXT, "cache_control": _CACHE_CONTROL}, "type", "text")
_CALL = _object(
    {
        "id": _TEXT,
        "type": {"const": "function"},
        "function": _object({"name": _TEXT, "arguments": _TEXT}, "name"),
    },
    *("id", "function"),
)
_MESSAGE = _object(
    {
        "role": {"type": "string", "minLength": 1},
        "content": {"anyOf": [_TEXT, _list(_PART), {"type": "null"}]},
        "name": _TEXT,
        "reasoning_content": {"type": ["string", "null"]},
        "tool_calls": _list(_CALL),
        "tool_call_id": _TEXT,
    },
    "role",
)
_RETAIN = _object(
    {
        "num_tokens": _integer(1, _COUNT_LIMIT),
        "message_index": _integer(0, _COUNT_LIMIT),
        "num_chars": _integer(0, _COUNT_LIMIT),
        "ttl_s": _TTL,
    }
)
_SCHEMA: _Schema = {"type": "object", "description": "A JSON schema."}
_TOOL = _object(
    {
        "type": {"const": "function"},
        "function": _object(
            {
                "name": {"type": "string", "minLength": 1, "maxLength": 128},
                "description": {"type": ["string", "null"]},
                "parameters": {"anyOf": [_SCHEMA, {"type": "null"}]},
                "strict": _FLAG,
            },
            "name",
        ),
    },
    *("type", "function"),
)
_TOOL_CHOICE: _Schema = {
    "anyOf": [
        {"type": "string", "description": "auto, none, required, or the name of a tool."},
        _object({"type": {"const": "function"}, "function": _object({"name": _TEXT}, "name")}, "type", "function"),
        {"type": "null"},
    ]
}
_NAMED_SCHEMA = _object({"name": _TEXT, "description": _TEXT, "schema": _SCHEMA, "strict": _FLAG}, "schema")
_RESPONSE_FORMAT: _Schema = {
    "anyOf": [
        _object({"type": {"const": "text"}}, "type"),
        _object({"type": {"const": "json_object"}, "schema": _SCHEMA}, "type"),
        _object({"type": {"const": "json_schema"}, "json_schema": _NAMED_SCHEMA}, "type", "json_schema"),
        {"type": "null"},
    ]
}
_STRUCTURED_OUTPUTS: _Schema = {
    "anyOf": [
        _object({"json": {"anyOf": [_SCHEMA, _TEXT]}}, "json"),
        _object({"json_object": {"const": True}}, "json_object"),
        _object({"regex": {"type": "string", "minLength": 1}}, "regex"),
        _object({"choice": _list({"type": "string", "minLength": 1}, minimum=1)}, "choice"),
        _object({"grammar": {"type": "string", "minLength": 1}}, "grammar"),
        {"type": "null"},
    ]
}
_SHARED: _Schema = {
    "model": {"type": ["string", "null"]},
    "stream": _FLAG,
    "stream_options": {
        "anyOf": [_object({"include_usage": _FLAG, "continuous_usage_stats": _FLAG}), {"type": "null"}],
    },
    "n": {"type": "integer", "minimum": 1, "maximum": 128},
    "max_tokens": _integer(1, _COUNT_LIMIT),
    "max_completion_tokens": _integer(1, _COUNT_LIMIT),
    "min_tokens": {"type": "integer", "minimum": 0},
    "temperature": _number(0, 100),
    "top_p": _number(0.001, 1),
    "top_k": _integer(-1, _COUNT_LIMIT),
    "min_p": _number(0, 1),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0.001, 100),
    "logit_bias": {"type": ["object", "null"], "additionalProperties": _number(-100, 100)},
    "seed": {"type": ["integer", "null"]},
    "stop": {"anyOf": [_TEXT, _list({"type": "string", "minLength": 1}, maximum=16), {"type": "null"}]},
    "stop_token_ids": _list(_TOKEN_ID),
    "ignore_eos": _FLAG,
    "prompt_logprobs": _integer(0, 20),
    "request_id": {"type": "string", "maxLength": 128},
    "return_token_ids": _FLAG,
    "parse_special_tokens": _FLAG,
    "response_format": _RESPONSE_FORMAT,
    "structured_outputs": _STRUCTURED_OUTPUTS,
    "priority": {"type": "integer"},
    "cache_salt": {"type": "string", "minLength": 1, "maxLength": 128},
    "prompt_cache_key": {"type": "string", "minLength": 1, "maxLength": 256},
    "prompt_cache_retention": {"enum": ["24h", "in-memory", None]},
    "cache_hints": _object({"retain": _list(_RETAIN, maximum=16), "release": _FLAG, "warm": _FLAG}),
    "user": _TEXT,
    "metadata": {"type": "object"},
    "store": _FLAG,
}

CHAT = _object(
    _SHARED
    | {
        "messages": _list(_MESSAGE, minimum=1),
        "logprobs": _FLAG,
        "top_logprobs": _integer(0, 20),
        "add_generation_prompt": _FLAG,
        "continue_final_message": _FLAG,
        "tools": _list(_TOOL),
        "tool_choice": _TOOL_CHOICE,
        "parallel_tool_calls": _FLAG,
    },
    "messages",
)
_PROMPT: _Schema = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        _list(_TOKEN_ID, minimum=1),
        _list({"type": "string", "minLength": 1}, minimum=1),
        _list(_list(_TOKEN_ID, minimum=1), minimum=1),
    ]
}
COMPLETION = _object(_SHARED | {"prompt": _PROMPT, "logprobs": _integer(0, 20), "echo": _FLAG}, "prompt")
EITHER: _Schema = {"anyOf": [CHAT, COMPLETION]}
TOKENIZE: _Schema = {
    "anyOf": [
        _object({"model": _TEXT, "prompt": _TEXT, "add_special_tokens": _FLAG}, "prompt"),
        _object(
            {
                "model": _TEXT,
                "messages": _list(_MESSAGE, minimum=1),
                "add_generation_prompt": _FLAG,
                "tools": _list(_TOOL),
                "tool_choice": _TOOL_CHOICE,
            },
            "messages",
        ),
    ]
}
DETOKENIZE = _object({"model": _TEXT, "tokens": _list(_TOKEN_ID)}, "tokens")
NOTHING: _Schema = {}
"""A route that takes no body."""

_ERROR = _object(
    {"error": _object({"message": _TEXT, "type": _TEXT, "param": {}, "code": {}}, "message", "type")}, "error"
)


def describe(summary: str, body: _Schema | None = None) -> dict[str, Any]:
    """Arguments of a route: what it is for, what it takes, and that its errors have OpenAI's form."""
    media = {"application/json": {"schema": _ERROR}}
    extra: dict[str, Any] = {
        "responses": {
            "200": {"description": "The answer."},
            "4XX": {"description": "The request is wrong, or not allowed.", "content": media},
            "503": {"description": "Not now.", "content": media},
        }
    }
    if body:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return {"summary": summary, "openapi_extra": extra}
