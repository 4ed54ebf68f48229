"""Sampling without sorting against the reference, which sorts: the same tokens from the same keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedllm_kernels.sampling import sample as reference
from pagedllm_kernels.triton.sampling import sample


def both(logits: torch.Tensor, rows: list[tuple[float, int, float, float]], seed: int = 0) -> tuple[Any, Any]:
    """Tokens by us and by the reference; rows of (temperature, top_k, top_p, min_p)."""
    temperatures, top_ks, top_ps, min_ps = zip(*rows, strict=True)
    keys = torch.randint(0, 2**32, (len(rows), 2), generator=torch.Generator().manual_seed(seed))
    args = (
        logits,
        torch.tensor(temperatures, dtype=torch.float32),
        torch.tensor(top_ks),
        torch.tensor(top_ps, dtype=torch.float32),
        torch.tensor(min_ps, dtype=torch.float32),
        keys,
    )
    return sample(*args).tolist(), reference(*args).tolist()


@pytest.mark.parametrize("vocab_size", [1, 37, 4096, 5000])
def test_same_tokens_as_the_reference(vocab_size: int):
    """Another noise, a bound off by one, or filters in another order."""
    filters = [
        (temperature, min(top_k, vocab_size), top_p, min_p)
        for temperature in (0.3, 1.0)
        for top_k in (1, 40, vocab_size)
        for top_p in (0.5, 1.0)
        for min_p in (0.0, 0.05)
    ]
    logits = 3 * torch.randn(len(filters), vocab_size)
    ours, theirs = both(logits, filters)
    assert ours == theirs


def test_what_is_filtered_out_is_never_drawn():
    """Equals of the last one kept are kept too, and the one behind them never is."""
    logits = torch.tensor([5.0, 4.0, 4.0, 4.0, 3.9, -torch.inf]).expand(60, -1).contiguous()
    ours, theirs = both(logits, [(10.0, 2, 1.0, 0.0)] * 60)
    assert ours == theirs
    assert set(ours) == {0, 1, 2, 3}


def test_equal_logits_and_bans():
    """With all distances 0, or most of them infinite, the search for a bound has one value to find."""
    same = torch.zeros(4, 50)
    banned = torch.full((4, 50), -torch.inf)
    banned[:, 7] = 1.0
    zeros_of_both_signs = torch.tensor([-0.0, 0.0]).repeat(4, 25)
    rows = [(1.0, 50, 1.0, 0.0), (1.0, 3, 0.5, 0.0), (1e-5, 50, 0.1, 0.5), (100.0, 1, 1.0, 1.0)]
    for logits in (same, zeros_of_both_signs, zeros_of_both_signs.neg(), banned):
        ours, theirs = both(logits, rows)
        assert ours == theirs
    assert ours == [7] * 4


@settings(max_examples=25, deadline=None)
@given(
    logits=st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=12),
    temperature=st.sampled_from([1e-5, 1e-3, 1.0, 100.0]),
    top_p=st.sampled_from([1e-9, 0.5, 1.0]),
    top_k=st.integers(1, 12),
    seed=st.integers(0, 3),
)
def test_extremes(logits: list[float], temperature: float, top_p: float, top_k: int, seed: int):
    """Tiny temperatures make distances infinite, and a tiny top_p still keeps the best."""
    ours, theirs = both(torch.tensor([logits]), [(temperature, min(top_k, len(logits)), top_p, 0.0)], seed)
    assert ours == theirs
