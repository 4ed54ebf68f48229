"""OpenAI's JSON <-> the types of pagedllm.api, both directions; used by the server and by the remote engine.

The two directions of each thing stand side by side, and what one writes the other reads as the same value. Reading a
request refuses what it does not know; reading an answer leaves it aside, since the server may be newer.
"""

from . import paths
from .errors import HttpError, decode_error, encode_error, retry_after_s
from .info import (
    TokenizeCall,
    decode_count,
    decode_detokenize_call,
    decode_health,
    decode_match,
    decode_models,
    decode_stats,
    decode_text,
    decode_tokenize_call,
    decode_tokens,
    encode_count_call,
    encode_detokenize_call,
    encode_health,
    encode_match,
    encode_models,
    encode_stats,
    encode_text,
    encode_tokenize_call,
    encode_tokens,
)
from .json_text import dump_json, parse_json
from .logprobs import Echo
from .outputs import EXTENSION, AnswerForm, decode_outputs, encode_outputs
from .requests import HARMLESS_FIELDS, GenerateCall, decode_call, encode_call, kind_of
from .sampling import Kind
from .stream import DONE, StreamDecoder, StreamEncoder

__all__ = [
    "DONE",
    "EXTENSION",
    "HARMLESS_FIELDS",
    "AnswerForm",
    "Echo",
    "GenerateCall",
    "HttpError",
    "Kind",
    "StreamDecoder",
    "StreamEncoder",
    "TokenizeCall",
    "decode_call",
    "decode_count",
    "decode_detokenize_call",
    "decode_error",
    "decode_health",
    "decode_match",
    "decode_models",
    "decode_outputs",
    "decode_stats",
    "decode_text",
    "decode_tokenize_call",
    "decode_tokens",
    "dump_json",
    "encode_call",
    "encode_count_call",
    "encode_detokenize_call",
    "encode_error",
    "encode_health",
    "encode_match",
    "encode_models",
    "encode_outputs",
    "encode_stats",
    "encode_text",
    "encode_tokenize_call",
    "encode_tokens",
    "kind_of",
    "parse_json",
    "paths",
    "retry_after_s",
]
