"""The KV pool's size, and the longest sequence that it allows."""

from __future__ import annotations

import logging

import pytest

from pagedllm.compute.memory import available_memory_bytes, gpu_pool_bytes, num_blocks_for, plan_pool
from pagedllm.config import EngineConfig
from pagedllm.errors import ConfigError


def plan(bytes_per_token: int = 1000, model_max_len: int = 1024, **options):
    return plan_pool(EngineConfig(**options), bytes_per_token=bytes_per_token, model_max_len=model_max_len)


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
    assert gpu_pool_bytes(**sizes, weights_bytes=900) == -100
