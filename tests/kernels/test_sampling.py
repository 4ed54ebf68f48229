"""Filters and draws against a plain numpy oracle on fixed logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedllm_kernels.sampling import greedy, sample

LOGITS = torch.tensor([[2.0, 1.0, 0.5, 3.0, -1.0, 0.0, 2.5, -4.0]])


def oracle(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Probabilities after temperature, top-k and top-p, by sorting."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    probs = np.exp(scaled - scaled.max())
    probs[order[top_k:]] = 0
    probs /= probs.sum()
    kept, total = [], 0.0
    for token in order:
        if total >= top_p or probs[token] == 0:
            break
        kept.append(token)
        total += probs[token]
    result = np.zeros_like(probs)
    result[kept] = probs[kept]
    return result / result.sum()


def draw(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float, top_k: int, top_p: float) -> list[int]:
    count = len(uniforms)
    return sample(
        logits.expand(count, -1),
        torch.full((count,), temperature),
        torch.full((count,), top_k),
        torch.full((count,), top_p),
        uniforms,
    ).tolist()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 8, 1.0), (0.5, 8, 1.0), (2.0, 3, 1.0), (1.0, 8, 0.6), (1.0, 4, 0.5), (0.7, 1, 1.0), (1.0, 8, 1e-6)],
)
def test_draws_follow_the_oracle(temperature: float, top_k: int, top_p: float):
    """Even uniforms make the counts exact to one draw per boundary."""
    count = 20_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = np.bincount(draw(LOGITS, uniforms, temperature, top_k, top_p), minlength=8) / count
    expected = oracle(LOGITS[0].numpy(), temperature, top_k, top_p)
    np.testing.assert_allclose(drawn, expected, atol=2 / count)


def test_rows_do_not_influence_each_other():
    logits = torch.cat([LOGITS, LOGITS * 2, LOGITS.flip(1)])
    uniforms = torch.tensor([0.3, 0.9, 0.5], dtype=torch.float64)
    temperatures, top_ks, top_ps = torch.tensor([1.0, 0.2, 5.0]), torch.tensor([8, 2, 5]), torch.tensor([1.0, 0.9, 0.3])
    together = sample(logits, temperatures, top_ks, top_ps, uniforms).tolist()
    for i in range(3):
        row = slice(i, i + 1)
        assert sample(logits[row], temperatures[row], top_ks[row], top_ps[row], uniforms[row]).tolist() == [together[i]]


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=12),
    temperature=st.sampled_from([1e-5, 1e-3, 1.0, 100.0]),
    top_p=st.sampled_from([1e-9, 0.5, 1.0]),
    uniform=st.sampled_from([0.0, 0.5, 1 - 2**-48]),
)
def test_extremes_stay_in_range(logits: list[float], temperature: float, top_p: float, uniform: float):
    """Tiny temperatures overflow to inf and NaN when the maximum is not subtracted first."""
    row = torch.tensor([logits])
    (token,) = draw(row, torch.tensor([uniform], dtype=torch.float64), temperature, len(logits), top_p)
    assert 0 <= token < len(logits)


def test_greedy_takes_the_first_of_equals():
    assert greedy(torch.tensor([[1.0, 3.0, 3.0], [0.0, 0.0, 0.0]])).tolist() == [1, 0]
