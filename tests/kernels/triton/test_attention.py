"""Decode, prefill and mixed attention under the interpreter, against torch by the 2x rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_cases import AttentionCase, assert_as_good_as_torch, attention_case

from pagedllm_kernels.reference import ReferenceKernels
from pagedllm_kernels.triton.launch import DecodeLaunch, PrefillLaunch
from pagedllm_kernels.triton.paged_attention import paged_attention, plan_paged_attention

# The rest of make test-interpret: float32 takes the same ways, only with less rounding.
BOTH = pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float16], ids=["float32", "float16"]
)
OPTIONS = [{}, {"window": 21}, {"soft_cap": 2.0}, {"window": 1, "soft_cap": 0.5}]
SHAPES = [(9, 3, 64, 16), (4, 4, 16, 5), (8, 1, 128, 32), (6, 2, 96, 64), (7, 1, 80, 128)]
WITH_SHAPES = pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "block_size"), SHAPES)
TORCH = ReferenceKernels()

# So small that short sequences have several shares, tiles and blocks of queries.
DECODE = DecodeLaunch(rows=16, tile=16, num_splits=4, least=16, num_warps=4, num_stages=2)
PREFILL = PrefillLaunch(rows=16, tile=16, num_warps=4, num_stages=2)


def check(case: AttentionCase, options: dict[str, Any], **launches: Any) -> None:
    """Compare with torch, which is not shown the padding."""
    qkv, cache, scale = case.tensors[0], case.tensors[1], 0.2
    num_kv_heads, head_dim = cache.shape[2:]
    ours = torch.full((qkv.shape[0], qkv.shape[1] - 2 * num_kv_heads * head_dim), torch.nan, dtype=qkv.dtype)
    for call in plan_paged_attention(*case.tensors, scale, ours, **options, **launches):
        call.launch()
    num_seqs = len(case.tensors[5]) - (len(qkv) - case.num_rows)
    rows = (slice(case.num_rows), slice(None), slice(None), slice(num_seqs), slice(num_seqs + 1), slice(num_seqs))
    theirs, exact = (
        TORCH.paged_attention(*(item[row] for item, row in zip(tensors, rows, strict=True)), scale, **options)
        for tensors in (case.tensors, case.float())
    )
    assert_as_good_as_torch(ours[: case.num_rows], theirs, exact)
    assert not ours[case.num_rows :].any(), "padding gets zeros"


@BOTH
@WITH_SHAPES
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_decode(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, options: Any):
    """Shares of a sequence overlap or leave something out, whatever the tiles' and blocks' edges are."""
    case = attention_case(
        [(1, 1), (1, 70), (1, 16), (1, 33)],
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype,
        num_padded=1,
    )  # fmt: skip
    check(case, options, decode=DECODE)


@BOTH
@WITH_SHAPES
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_mixed(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, options: Any):
    """Whole prompts, chunks and single tokens: each row is computed by one kernel, with its own sequence's KV."""
    case = attention_case(
        [(7, 7), (1, 40), (19, 50), (1, 1), (2, 17)],
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype,
    )  # fmt: skip
    check(case, options, decode=DECODE, prefill=PREFILL)


@pytest.mark.parametrize("options", [{}, {"window": 30, "soft_cap": 2.0}], ids=str)
def test_the_launch_table_s_own_choices(options: dict[str, Any]):
    """The kernels fit only the sizes of the other tests."""
    lengths = [(1, 300), (40, 90), (1, 20)]
    case = attention_case(lengths, num_heads=6, num_kv_heads=2, head_dim=64, block_size=16)
    ours = paged_attention(*case.tensors, 0.125, **options)
    assert_as_good_as_torch(ours, ours, TORCH.paged_attention(*case.tensors, 0.125, **options))
    check(case, options)


def test_one_share_writes_its_result_itself():
    case = attention_case([(1, 30), (1, 5)], num_heads=4, num_kv_heads=2, head_dim=16, block_size=4, num_padded=2)
    launch = DecodeLaunch(rows=16, tile=16, num_splits=1, least=16, num_warps=4, num_stages=2)
    check(case, {}, decode=launch)


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 20), st.integers(0, 40)).map(lambda pair: (pair[0], sum(pair))), min_size=1, max_size=5
    ),
    window=st.sampled_from([None, 1, 7, 16, 60]),
    block_size=st.sampled_from([3, 16]),
    rows=st.sampled_from([16, 32]),
)
def test_any_lengths(lengths: list[tuple[int, int]], window: int | None, block_size: int, rows: int):
    """A block of queries is given to the wrong sequence, or stretches of tiles miss a position, at some odd length."""
    case = attention_case(lengths, num_heads=6, num_kv_heads=2, head_dim=16, block_size=block_size)
    prefill = PrefillLaunch(rows=rows, tile=16, num_warps=4, num_stages=2)
    check(case, {"window": window}, decode=DECODE, prefill=prefill)


def test_many_sequences_are_looked_through_in_pieces():
    """A block's sequence is found among more than one look's worth."""
    lengths = [(1, 1)] * 300
    lengths[280] = (20, 23)
    case = attention_case(lengths, num_heads=1, num_kv_heads=1, head_dim=16, block_size=4)
    (prefill, *_) = plan_paged_attention(*case.tensors, 0.2, ours := torch.zeros(319, 16), prefill=PREFILL)
    prefill.launch()
    expected = TORCH.paged_attention(*case.tensors, 0.2)
    torch.testing.assert_close(ours[280:300], expected[280:300], rtol=1e-5, atol=1e-5)
    assert not ours[:280].any(), "single queries are left to decode"
