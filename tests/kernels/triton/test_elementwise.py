"""Norms, rotation with KV store and gates under the interpreter, against torch by the 2x rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_cases import assert_as_good_as_torch

from pagedllm_kernels.reference import ReferenceKernels
from pagedllm_kernels.rope import rope_table
from pagedllm_kernels.triton.kernels import TritonKernels

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
OURS, TORCH = TritonKernels(), ReferenceKernels()


@BOTH
@pytest.mark.parametrize("size", [64, 96, 576, 2048])
@pytest.mark.parametrize("delta_dtype", [None, torch.float32, "same"])
def test_add_rms_norm(dtype: torch.dtype, size: int, delta_dtype: Any):
    """Sizes that are no power of 2 count their padding, or the stream is left without its addition."""
    x, weight = torch.randn(5, size), torch.rand(size)
    delta = None if delta_dtype is None else torch.randn(5, size).to(dtype if delta_dtype == "same" else delta_dtype)
    ours, theirs = x.clone(), x.clone()
    normed = OURS.add_rms_norm(ours, delta, weight, 1e-5, dtype)
    expected = TORCH.add_rms_norm(theirs, delta, weight, 1e-5, dtype)
    exact = TORCH.add_rms_norm(x.clone(), delta, weight, 1e-5, torch.float32)
    assert torch.equal(ours, theirs), "the residual stream"
    assert normed.dtype == dtype
    assert_as_good_as_torch(normed, expected, exact)


def test_no_rows():
    """A batch in which no sequence reaches its end has no rows to normalise for the logits."""
    assert OURS.add_rms_norm(torch.randn(0, 64), None, torch.rand(64), 1e-5, torch.float32).shape == (0, 64)


@BOTH
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (9, 3, 64), (6, 1, 96), (16, 8, 128)])
def test_norm_heads(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int):
    """Keys take the weight of queries, or values are normalised too."""
    qkv = torch.randn(3, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    weights = torch.rand(head_dim), torch.rand(head_dim) + 1
    results = []
    for kernels, work in ((OURS, dtype), (TORCH, dtype), (TORCH, torch.float32)):
        changed = qkv.to(work).clone()
        kernels.norm_heads(changed, *weights, num_kv_heads, 1e-6)
        results.append(changed)
    assert_as_good_as_torch(*results)
    values = num_kv_heads * head_dim
    assert torch.equal(results[0][:, -values:], qkv[:, -values:])


@BOTH
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (9, 3, 64), (6, 1, 96), (16, 8, 128)])
@pytest.mark.parametrize("block_size", [1, 16])
def test_rope_store(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int):
    """Heads go to each other's place, halves are turned the wrong way, or a slot that is not ours is written."""
    num_tokens = 6
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    table = rope_table(torch.rand(head_dim // 2), 200)
    positions, slots = torch.randint(0, 200, (num_tokens,)), torch.randperm(16)[:num_tokens]
    results = []
    for kernels, work in ((OURS, dtype), (TORCH, dtype), (TORCH, torch.float32)):
        rotated = qkv.to(work).clone()
        caches = [torch.zeros(16 // block_size, block_size, num_kv_heads, head_dim, dtype=work) for _ in range(2)]
        kernels.rope_store(rotated, positions, table, *caches, slots)
        results.append(torch.cat([rotated.flatten(), *(cache.flatten() for cache in caches)]))
    assert_as_good_as_torch(*results)


def test_padding_is_not_stored():
    """A padded row that wrote its KV would overwrite somebody's."""
    qkv = torch.randn(3, 4 * 16)
    caches = [torch.zeros(2, 2, 1, 16) for _ in range(2)]
    OURS.rope_store(qkv, torch.zeros(3, dtype=torch.int64), torch.ones(4, 16), *caches, torch.tensor([-1, 2, -1]))
    for cache in caches:
        assert cache.flatten(0, 1).any(dim=-1).flatten().tolist() == [False, False, True, False]


@BOTH
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("size", [80, 1024, 1500])
def test_gated_activation(dtype: torch.dtype, gelu: bool, size: int):
    """Where exp overflows, inf / inf would be NaN; and columns beyond the last program's are left out."""
    gate_up = (4 * torch.randn(3, 2 * size)).to(dtype)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, -2e3, 2e3]).to(dtype)
    exact = TORCH.gated_activation(gate_up.float(), gelu=gelu)
    ours = OURS.gated_activation(gate_up, gelu=gelu)
    assert_as_good_as_torch(ours, TORCH.gated_activation(gate_up, gelu=gelu), exact)
