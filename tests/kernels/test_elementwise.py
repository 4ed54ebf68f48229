"""Normalisation, rotary embedding and activation against their formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch

from pagedllm_kernels.activation import gelu_tanh_mul, silu_mul, soft_cap
from pagedllm_kernels.rms_norm import rms_norm
from pagedllm_kernels.rope import apply_rope, rope_table


def test_rms_norm():
    x, weight = torch.randn(5, 32), torch.rand(32)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), expected, rtol=1e-5, atol=1e-6)


def test_rms_norm_rounds_once():
    """float32 in, bfloat16 out: rounded at the end, not between the steps."""
    x, weight = torch.randn(50, 64), torch.rand(64).bfloat16()
    expected = rms_norm(x, weight.float(), 1e-5).bfloat16()
    assert rms_norm(x, weight, 1e-5).dtype == torch.bfloat16
    assert torch.equal(rms_norm(x, weight, 1e-5), expected)


def test_rms_norm_to_another_type():
    """Norms stay in float32 beside weights in bfloat16, so the result's type has to be said."""
    x, weight = torch.randn(50, 64).bfloat16(), torch.rand(64) + 0.5
    assert rms_norm(x, weight, 1e-5).dtype == torch.float32
    expected = rms_norm(x, weight, 1e-5).bfloat16()
    assert rms_norm(x, weight, 1e-5, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(rms_norm(x, weight, 1e-5, dtype=torch.bfloat16), expected)


def test_rope_amplitude():
    """LongRoPE's rotation also scales."""
    inv_freq, x, positions = torch.tensor([1.0, 0.1]), torch.randn(3, 2, 4), torch.tensor([0, 7, 30])
    plain = apply_rope(x, positions, rope_table(inv_freq, 31))
    scaled = apply_rope(x, positions, rope_table(inv_freq, 31, amplitude=1.25))
    torch.testing.assert_close(scaled, plain * 1.25)


def test_rope_rotates_pairs_by_position_times_frequency():
    inv_freq = torch.tensor([1.0, 0.1])
    x = torch.randn(3, 2, 4)
    positions = torch.tensor([0, 7, 30])
    rotated = apply_rope(x, positions, rope_table(inv_freq, 31))
    for token, position in enumerate(positions.tolist()):
        for head in range(2):
            for i in range(2):
                angle = position * float(inv_freq[i])
                first, second = float(x[token, head, i]), float(x[token, head, i + 2])
                expected = complex(first, second) * complex(math.cos(angle), math.sin(angle))
                assert float(rotated[token, head, i]) == pytest.approx(expected.real, abs=1e-5)
                assert float(rotated[token, head, i + 2]) == pytest.approx(expected.imag, abs=1e-5)


def test_silu_mul():
    gate_up = torch.randn(4, 10)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(silu_mul(gate_up).double(), expected, rtol=1e-5, atol=1e-6)


def test_gelu_tanh_mul():
    gate_up = torch.randn(4, 10) * 3
    gate, up = gate_up.double().chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    expected = 0.5 * gate * (1 + inner.tanh()) * up
    torch.testing.assert_close(gelu_tanh_mul(gate_up).double(), expected, rtol=1e-5, atol=1e-6)


def test_soft_cap():
    """Hardly anything near 0, never beyond the cap."""
    x = torch.tensor([-1000.0, -1.0, -0.001, 0.0, 0.001, 1.0, 1000.0])
    expected = 2.0 * (x.double() / 2.0).tanh()
    torch.testing.assert_close(soft_cap(x, 2.0).double(), expected, rtol=1e-5, atol=1e-7)
    assert soft_cap(x, 2.0).abs().max() <= 2.0
