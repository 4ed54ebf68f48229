"""Bias, bans and penalties against a plain numpy oracle on fixed logits, and without effect on neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from control_helpers import EOS, make_sequence

from pagedllm.compute.logits import adjust_logits
from pagedllm.compute.sampler import Sampler
from pagedllm_kernels.reference import ReferenceKernels

PROMPT, OUTPUT = [1, 2, 2, 3], [3, 3, 5]
LOGITS = torch.tensor([[2.0, -1.0, 0.5, 3.0, -0.5, 0.25, 2.5, -4.0, 1.0, 4.0]])


def oracle(logits: np.ndarray, **params: Any) -> np.ndarray:
    """What each option means, token by token."""
    result = logits.astype(np.float64).copy()
    for token, bias in params.get("logit_bias", {}).items():
        result[token] += bias
    if params.get("min_tokens", 0) > len(OUTPUT):
        for token in {EOS, *params.get("stop_token_ids", ())}:
            result[token] = -np.inf
    for token in range(len(result)):
        penalty = params.get("repetition_penalty", 1.0)
        if token in PROMPT + OUTPUT:
            result[token] = result[token] / penalty if result[token] > 0 else result[token] * penalty
        result[token] -= params.get("frequency_penalty", 0.0) * OUTPUT.count(token)
        result[token] -= params.get("presence_penalty", 0.0) * (token in OUTPUT)
    return result


CASES: list[dict[str, Any]] = [
    {"logit_bias": {0: 5.0, 7: -100.0}},
    {"presence_penalty": 1.5},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5},
    {"min_tokens": 4},
    {"min_tokens": 4, "stop_token_ids": [6, 8]},
    {"min_tokens": 3, "stop_token_ids": [6]},
    {
        "logit_bias": {5: 2.0},
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "min_tokens": 9,
    },
]


def sequence_with(**params: Any) -> Any:
    sequence = make_sequence(PROMPT, max_tokens=20, **params)
    for token_id in OUTPUT:
        sequence.append(token_id)
    return sequence


@pytest.mark.parametrize("params", CASES, ids=str)
def test_each_option_and_its_neighbours(params: dict[str, Any]):
    """Presence and frequency count the completion only; other engines have counted the prompt too."""
    neighbour = sequence_with()
    raw = LOGITS.expand(3, -1).contiguous()
    adjusted = adjust_logits(raw, [neighbour, sequence_with(**params), neighbour])
    np.testing.assert_allclose(adjusted[1].double().numpy(), oracle(LOGITS[0].numpy(), **params), rtol=1e-6)
    assert torch.equal(adjusted[0], LOGITS[0])
    assert torch.equal(adjusted[2], LOGITS[0])
    assert torch.equal(raw, LOGITS.expand(3, -1)), "the raw logits are still needed for logprobs"


def test_nothing_is_copied_when_nobody_asks():
    assert adjust_logits(LOGITS, [sequence_with(temperature=0.5, top_k=3)]) is LOGITS


def test_greedy_follows_the_adjusted_logits():
    plain, biased = sequence_with(temperature=0.0), sequence_with(temperature=0.0, logit_bias={7: 50.0})
    assert Sampler(ReferenceKernels())(LOGITS.expand(2, -1), [plain, biased]) == [EOS, 7]


def test_a_banned_end_is_never_sampled():
    sampler = Sampler(ReferenceKernels())
    for seed in range(200):
        sequence = sequence_with(temperature=2.0, min_tokens=10)
        sequence.seed = seed
        assert sampler(LOGITS, [sequence]) != [EOS]


def test_scores_are_log_probabilities_of_the_raw_logits():
    scores = Sampler(ReferenceKernels()).score(LOGITS.expand(3, -1), [9, 7, 0], [0, 2, 20])
    expected = LOGITS[0].double().log_softmax(0)
    assert [score.token_id for score in scores] == [9, 7, 0]
    for score in scores:
        assert score.logprob == pytest.approx(float(expected[score.token_id]), abs=1e-5)
    assert [len(score.top) for score in scores] == [0, 2, 10]
    assert [token_id for token_id, _ in scores[1].top] == [9, 3]
    assert [token_id for token_id, _ in scores[2].top] == expected.argsort(descending=True).tolist()


def test_scores_are_finite():
    """-inf is not JSON: other servers have answered 500."""
    logits = torch.tensor([[0.0, float("-inf")]])
    (score,) = Sampler(ReferenceKernels()).score(logits, [1], [2])
    assert score.logprob == -9999.0
    assert score.top[1] == (1, -9999.0)


def test_many_rows_are_scored_in_slices_without_mixing_them():
    logits = torch.randn(150, 20, generator=torch.Generator().manual_seed(0))
    token_ids = [i % 20 for i in range(150)]
    scores = Sampler(ReferenceKernels()).score(logits, token_ids, [i % 3 for i in range(150)])
    expected = logits.log_softmax(-1)
    for i, score in enumerate(scores):
        assert score.logprob == pytest.approx(float(expected[i, token_ids[i]]), abs=1e-6)
        assert len(score.top) == i % 3
