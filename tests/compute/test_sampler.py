"""Per-request parameters in one batch, and noise that depends on nothing but seed, index and position."""

from __future__ import annotations

import itertools

import pytest
import torch
from control_helpers import make_sequence

from pagedllm.compute.sampler import Sampler, noise_key
from pagedllm_kernels.reference import ReferenceKernels
from pagedllm_kernels.sampling import gumbel_noise

LOGITS = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))


def test_greedy_and_sampled_rows_share_a_batch():
    sampler = Sampler(ReferenceKernels())
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
    sampler = Sampler(ReferenceKernels())
    assert sampler(LOGITS, [row]) == sampler(LOGITS, [make_sequence([1], temperature=1.0)])


def test_noise_is_a_pure_function():
    assert noise_key(1, 2, 3) == noise_key(1, 2, 3)
    keys = {noise_key(*key) for key in itertools.product(range(20), range(5), range(50))}
    assert len(keys) == 20 * 5 * 50


def test_noise_takes_any_seed():
    for seed in (0, -1, 2**63, -(2**63), 2**64 - 1):
        assert all(0 <= half < 2**32 for half in noise_key(seed, 0, 0))


def test_noise_is_gumbel_and_uncorrelated():
    """Along tokens, positions, and between seeds."""
    keys = torch.tensor([noise_key(seed, 0, position) for seed in (7, 8) for position in range(200)])
    uniform = (-(-gumbel_noise(keys, 500)).exp()).exp().view(2, 200, 500)
    counts = torch.histc(uniform.float(), bins=20, min=0, max=1) / uniform.numel()
    assert (counts - 0.05).abs().max() < 0.002
    for one, other in (
        (uniform[:, :, 1:], uniform[:, :, :-1]),
        (uniform[:, 1:], uniform[:, :-1]),
        (uniform[0], uniform[1]),
    ):
        assert abs(torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1]) < 0.02
