"""The KV pool's size, and the longest sequence that it allows."""

from __future__ import annotations

import logging

import pytest

from pagedllm.compute.memory import (
    available_memory_bytes,
    fit_limits,
    fit_limits_to_gpu,
    gpu_pool_bytes,
    num_blocks_for,
    plan_pool,
)
from pagedllm.config import EngineConfig, StepLimits
from pagedllm.errors import ConfigError


def plan(bytes_per_token: int = 1000, model_max_len: int = 1024, **options):
    config = EngineConfig(**options)
    return plan_pool(config, config.step_limits("cpu"), bytes_per_token=bytes_per_token, model_max_len=model_max_len)


def test_the_default_is_the_least_of_three_limits():
    small = plan(max_num_seqs=2)
    assert (small.num_blocks, small.max_model_len) == (2 * 64, 1024)
    assert plan(bytes_per_token=100_000, max_num_seqs=64).num_blocks <= 512 * 2**20 // 1_600_000


def test_an_unset_length_is_fitted_to_the_pool_with_a_log_line(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "pagedllm"):
        pool = plan(kv_cache_memory_bytes=40 * 16_000)
    assert (pool.num_blocks, pool.max_model_len) == (40, 640)
    assert "640" in caplog.text
    assert "kv_cache_memory_bytes" in caplog.text


def test_a_set_length_that_does_not_fit_is_refused_with_the_largest_that_does():
    """An engine that starts with a longer limit than its pool would accept requests that can never run."""
    with pytest.raises(ConfigError, match=r"max_model_len=1000.*640"):
        plan(kv_cache_memory_bytes=40 * 16_000, max_model_len=1000)
    assert plan(kv_cache_memory_bytes=40 * 16_000, max_model_len=640).max_model_len == 640


def test_a_length_above_the_models_is_refused():
    with pytest.raises(ConfigError, match=r"max_model_len=2000.*1024"):
        plan(max_model_len=2000)


def test_a_pool_below_one_block_is_refused():
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes=15999"):
        plan(kv_cache_memory_bytes=15_999)


def test_available_memory_is_known():
    assert 2**20 < available_memory_bytes() < 2**50


def test_a_last_block_may_be_part_full():
    assert [num_blocks_for(num_tokens, 16) for num_tokens in (1, 16, 17, 4096)] == [1, 1, 2, 256]


def test_a_gpu_has_for_kv_what_weights_and_activations_leave_of_its_share():
    sizes = {"memory_bytes": 1000, "utilization": 0.9, "activation_bytes": 100}
    assert gpu_pool_bytes(**sizes, weights_bytes=300) == 500
    assert gpu_pool_bytes(**sizes, weights_bytes=300, others_bytes=70) == 430
    assert gpu_pool_bytes(**sizes, weights_bytes=900) == -100


def limits(max_num_seqs: int, max_num_batched_tokens: int) -> StepLimits:
    return StepLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)


@pytest.mark.parametrize(
    ("options", "on_cpu", "on_gpu"),
    [
        ({}, (64, 512), (256, 8192)),
        ({"max_num_seqs": 3}, (3, 512), (3, 8192)),
        ({"max_num_batched_tokens": 20}, (20, 20), (20, 20)),
        ({"max_num_seqs": 9000}, (9000, 9000), (9000, 9000)),
        ({"max_num_seqs": 7, "max_num_batched_tokens": 7}, (7, 7), (7, 7)),
    ],
)
def test_limits_by_device(options: dict[str, int], on_cpu: tuple[int, int], on_gpu: tuple[int, int]):
    """A default that what was asked for makes impossible: more sequences than tokens."""
    config = EngineConfig(**options)
    assert config.step_limits("cpu") == limits(*on_cpu)
    assert config.step_limits("cuda") == limits(*on_gpu)


@pytest.mark.parametrize(
    ("options", "fitted"),
    [
        ({}, (10, 160)),
        ({"max_num_seqs": 64}, (64, 160)),
        ({"max_num_seqs": 200}, (200, 200)),
        ({"max_num_batched_tokens": 512}, (10, 512)),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 512}, (64, 512)),
    ],
)
def test_defaults_are_lowered_to_what_the_pool_holds(options: dict[str, int], fitted: tuple[int, int]):
    """Graphs recorded for batches that can never be; or an option that was given and does not count."""
    config = EngineConfig(**options, block_size=16)
    assert fit_limits(config, config.step_limits("cpu"), num_blocks=10) == limits(*fitted)
    roomy = config.step_limits("cuda")
    assert fit_limits(config, roomy, num_blocks=10_000) == roomy


def test_a_step_that_leaves_no_room_on_a_gpu_is_made_smaller():
    """A model that fits is refused because of a default; or a limit that was asked for is changed."""
    measured: list[StepLimits] = []

    def measure(given: StepLimits) -> int:
        measured.append(given)
        return 50_000 - 10 * given.max_num_batched_tokens - given.max_num_seqs

    # 10 bytes a token: 8192 tokens leave nothing, 4096 leave room for fewer, 2048 for themselves.
    chosen, size = fit_limits_to_gpu(EngineConfig(), measure, block_bytes=160)
    assert measured == [limits(256, 8192), limits(128, 4096), limits(64, 2048)]
    assert (chosen, size) == (limits(64, 2048), 29_456)
    asked = EngineConfig(max_num_batched_tokens=8192, max_num_seqs=100)
    assert fit_limits_to_gpu(asked, measure, block_bytes=160) == (limits(100, 8192), -32_020)
    _, too_small = fit_limits_to_gpu(EngineConfig(), lambda _: -1, block_bytes=160)
    assert too_small == -1
