"""Per-request parameters in one batch, and noise that depends on nothing but seed, index and position."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from control_helpers import make_sequence

from pagedllm.compute.sampler import Sampler, uniform_noise

LOGITS = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))


def test_greedy_and_sampled_rows_share_a_batch():
    sampler = Sampler()
    rows = [
        make_sequence([1], temperature=0.0),
        make_sequence([1], temperature=1.0, top_k=1),
        make_sequence([1], temperature=1e-12),
        make_sequence([1], temperature=5.0),
    ]
    best = int(LOGITS.argmax())
    token_ids = sampler(LOGITS.expand(4, -1), rows)
    assert token_ids[:3] == [best] * 3
    assert token_ids[3] == sampler(LOGITS, [rows[3]])[0]


@pytest.mark.parametrize("top_k", [0, -1, 50, 10_000, None])
def test_every_way_to_say_all_tokens(top_k: int | None):
    row = make_sequence([1], temperature=1.0, top_k=top_k)
    assert Sampler()(LOGITS, [row]) == Sampler()(LOGITS, [make_sequence([1], temperature=1.0)])


def test_noise_is_a_pure_function():
    assert uniform_noise(1, 2, 3) == uniform_noise(1, 2, 3)
    values = {
        uniform_noise(seed, index, position) for seed in range(20) for index in range(5) for position in range(50)
    }
    assert len(values) == 20 * 5 * 50


def test_noise_takes_any_seed():
    for seed in (0, -1, 2**63, -(2**63), 2**64 - 1):
        assert 0 <= uniform_noise(seed, 0, 0) < 1


def test_noise_is_uniform_and_uncorrelated():
    noise = np.array([uniform_noise(7, 0, position) for position in range(20_000)])
    counts = np.histogram(noise, bins=20, range=(0, 1))[0]
    assert abs(counts - 1000).max() < 150
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.03
    other = np.array([uniform_noise(8, 0, position) for position in range(20_000)])
    assert abs(np.corrcoef(noise, other)[0, 1]) < 0.03
