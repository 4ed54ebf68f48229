"""Filters and draws against a plain numpy oracle on fixed logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedllm_kernels.cpu.kernels import CPUKernels
from pagedllm_kernels.reference import ReferenceKernels
from pagedllm_kernels.sampling import _thresholds, greedy, gumbel_noise, sample

LOGITS = torch.tensor([[2.0, 1.0, 0.5, 3.0, -1.0, 0.0, 2.5, -4.0]])


def oracle(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Probabilities after temperature, min-p, top-k and top-p, by sorting."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    probs = np.exp(scaled - scaled.max())
    probs[probs < min_p * probs.max()] = 0
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


def draw(
    logits: torch.Tensor, count: int, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> list[int]:
    """``count`` draws under consecutive keys."""
    keys = torch.stack((torch.arange(count), torch.full((count,), 17)), dim=1)
    return sample(
        logits.expand(count, -1),
        torch.full((count,), temperature),
        torch.full((count,), top_k),
        torch.full((count,), top_p),
        torch.full((count,), min_p),
        keys,
    ).tolist()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 8, 1.0, 0.0),
        (0.5, 8, 1.0, 0.0),
        (2.0, 3, 1.0, 0.0),
        (1.0, 8, 0.6, 0.0),
        (1.0, 4, 0.5, 0.0),
        (0.7, 1, 1.0, 0.0),
        (1.0, 8, 1e-6, 0.0),
        (1.0, 8, 1.0, 0.3),
        (2.0, 8, 1.0, 0.3),
        (1.0, 8, 1.0, 1.0),
        (1.0, 3, 0.9, 0.1),
        (1.0, 8, 0.7, 0.2),
    ],
)
def test_draws_follow_the_oracle(temperature: float, top_k: int, top_p: float, min_p: float):
    """Counts within four standard deviations; what the filters remove is never drawn."""
    count = 20_000
    drawn = np.bincount(draw(LOGITS, count, temperature, top_k, top_p, min_p), minlength=8) / count
    expected = oracle(LOGITS[0].numpy(), temperature, top_k, top_p, min_p)
    assert (drawn[expected == 0] == 0).all()
    assert (np.abs(drawn - expected) <= 4 * np.sqrt(expected * (1 - expected) / count)).all()


def test_rounding_differences_rarely_change_a_draw():
    """With a cumulative distribution, differences of 1e-5 in the logits changed a token in every few hundred."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(1, 5000, generator=generator)
    nearby = logits + 1e-5 * torch.randn(1, 5000, generator=generator)
    args = (2000, 1.0, 5000, 0.95)
    assert sum(a != b for a, b in zip(draw(logits, *args), draw(nearby, *args), strict=True)) <= 1


def test_rows_do_not_influence_each_other():
    logits = torch.cat([LOGITS, LOGITS * 2, LOGITS.flip(1)])
    keys = torch.tensor([[3, 1], [4, 1], [5, 9]])
    temperatures, top_ks, top_ps = torch.tensor([1.0, 0.2, 5.0]), torch.tensor([8, 2, 5]), torch.tensor([1.0, 0.9, 0.3])
    args = (logits, temperatures, top_ks, top_ps, torch.tensor([0.0, 0.5, 0.0]), keys)
    together = sample(*args).tolist()
    for i in range(3):
        assert sample(*(arg[i : i + 1] for arg in args)).tolist() == [together[i]]


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=12),
    temperature=st.sampled_from([1e-5, 1e-3, 1.0, 100.0]),
    top_p=st.sampled_from([1e-9, 0.5, 1.0]),
    keys=st.tuples(st.sampled_from([0, 1, 2**32 - 1]), st.sampled_from([0, 2**32 - 1])),
)
def test_extremes_stay_in_range(logits: list[float], temperature: float, top_p: float, keys: tuple[int, int]):
    """Tiny temperatures overflow to inf and NaN when the maximum is not subtracted first."""
    row = torch.tensor([logits])
    (token,) = sample(
        row,
        torch.tensor([temperature]),
        torch.tensor([len(logits)]),
        torch.tensor([top_p]),
        torch.tensor([0.0]),
        torch.tensor([keys]),
    ).tolist()
    assert 0 <= token < len(logits)
    assert temperature > 1e-3 or row[0, token] >= row.max() - 30 * temperature


def test_greedy_takes_the_first_of_equals(kernels: CPUKernels):
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, 0.0, 0.0]])
    assert greedy(logits).tolist() == kernels.greedy(logits).tolist() == [1, 0]


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 1000])
def test_greedy_finds_the_largest_wherever_it_is(vocab_size: int, kernels: CPUKernels):
    """The last tokens of a vocabulary do not fill a vector, and filtered rows are full of -inf."""
    logits = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(0)).clamp(max=5.0)
    logits[::2] = -torch.inf
    logits.fill_diagonal_(9.0)
    assert greedy(logits).tolist() == kernels.greedy(logits).tolist() == list(range(vocab_size))


@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 50.0])
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 5000])
@pytest.mark.usefixtures("kernels")
def test_the_draw_that_skips_hopeless_tokens_is_the_draw(spread: float, vocab_size: int):
    """A bound on the noise that is a little too tight would change a token once in a thousand draws."""
    generator = torch.Generator().manual_seed(0)
    scaled = spread * torch.randn(500, vocab_size, generator=generator)
    scaled -= scaled.amax(dim=-1, keepdim=True)
    scaled[::3, : vocab_size - 1] = -torch.inf  # filtered, all but one
    scaled[1::3, : vocab_size // 2] = -torch.inf
    keys = torch.randint(0, 2**32, (500, 2), generator=generator)
    expected = (scaled.double() + gumbel_noise(keys, vocab_size)).argmax(dim=-1)
    assert torch.equal(torch.ops.pagedllm_cpu.draw(scaled, keys), expected)


@pytest.mark.parametrize("spread", [0.01, 1.0, 10.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(4000, 0.9, 0.0), (4000, 0.999, 0.0), (50, 1.0, 0.0), (2000, 1.0, 0.0), (2000, 0.5, 0.01), (4000, 1.0, 0.2)],
)
def test_filters_need_no_whole_sort_but_know_when_they_do(spread: float, top_k: int, top_p: float, min_p: float):
    """Flat distributions keep more tokens than were ranked at first."""
    logits = spread * torch.randn(3, 4000, generator=torch.Generator().manual_seed(0))
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    args = (torch.full((3,), top_k), torch.full((3,), top_p), torch.full((3,), min_p))
    thresholds = _thresholds(scaled, *args)
    for row, threshold in zip(scaled, thresholds, strict=True):
        kept = oracle(row.numpy(), 1.0, top_k, float(np.float32(top_p)), float(np.float32(min_p))) > 0
        assert abs(int((row >= threshold).sum()) - int(kept.sum())) <= 1, "equal but for a sum's last bits"


def test_the_kernels_that_were_chosen_choose_the_tokens(kernels: CPUKernels, monkeypatch: pytest.MonkeyPatch):
    """Plain torch was asked for, and the C++ operations serve because another engine of the process has loaded them."""
    logits = 3 * torch.randn(6, 5000)
    rows = (torch.full((6,), 0.8), torch.full((6,), 50), torch.full((6,), 0.9), torch.zeros(6))
    args = (logits, *rows, torch.randint(0, 2**32, (6, 2)))
    plain = ReferenceKernels()
    expected = plain.greedy(logits), plain.sample(*args)
    assert torch.equal(kernels.greedy(logits), expected[0])
    assert torch.equal(kernels.sample(*args), expected[1])
    for operation in ("greedy", "draw"):
        monkeypatch.setattr(torch.ops.pagedllm_cpu, operation, None)
    assert torch.equal(plain.greedy(logits), expected[0])
    assert torch.equal(plain.sample(*args), expected[1])
    with pytest.raises(TypeError):
        kernels.greedy(logits)
    with pytest.raises(TypeError):
        kernels.sample(*args)
