"""The C++ kernels against the torch references, by the 2x rule, on whichever instruction set this machine has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedllm_kernels.cpu.kernels import CPUKernels
from pagedllm_kernels.interface import Kernels
from pagedllm_kernels.reference import ReferenceKernels
from pagedllm_kernels.rope import rope_table

DTYPES = [torch.float32, torch.bfloat16]
BOTH = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


def assert_as_good_as_torch(ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> None:
    """Our error against float32 is at most twice that of torch in the same precision, or float32's own rounding."""
    assert ours.shape == exact.shape
    if exact.numel() == 0:
        return
    assert torch.isfinite(ours).all()
    allowed = 2 * (theirs.float() - exact.float()).abs().max().item() + 2e-5 * exact.float().abs().max().item()
    assert (ours.float() - exact.float()).abs().max().item() <= allowed


def attention_case(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> Any:
    """Decode, chunks, whole prefills and short stretches in one batch, over shuffled blocks; other blocks hold NaN."""
    generator = torch.Generator().manual_seed(0)
    lengths = [(1, 1), (1, 700), (33, 33), (70, 200), (2, 90), (4, 17), (5, 129), (1, 1100)]  # (queries, all tokens)
    counts = [-(-total // block_size) for _, total in lengths]
    free = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    shape = (len(free), block_size, num_kv_heads, head_dim)
    key_cache, value_cache = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for i, (_, total) in enumerate(lengths):
        tables[i, : counts[i]] = torch.tensor([free.pop() for _ in range(counts[i])], dtype=torch.int32)
        slots = torch.tensor([int(tables[i, j // block_size]) * block_size + j % block_size for j in range(total)])
        for cache in (key_cache, value_cache):
            cache.view(-1, num_kv_heads, head_dim)[slots] = torch.randn(
                total, num_kv_heads, head_dim, generator=generator
            ).to(dtype)
    bounds = torch.tensor([0, *(queries for queries, _ in lengths)]).cumsum(0).int()
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(int(bounds[-1]), width, generator=generator).to(dtype)
    lens = torch.tensor([total for _, total in lengths], dtype=torch.int32)
    return qkv, key_cache, value_cache, tables, bounds, lens


@BOTH
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(9, 3, 64, 16), (4, 4, 16, 5), (8, 1, 128, 16), (6, 2, 96, 32), (10, 2, 80, 16)],
)
@pytest.mark.parametrize("options", [{}, {"window": 50}, {"soft_cap": 2.0}, {"window": 1, "soft_cap": 0.5}], ids=str)
def test_paged_attention(
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    options: dict[str, Any],
    kernels: Kernels,
):
    case = attention_case(dtype, num_heads, num_kv_heads, head_dim, block_size)
    scale = head_dim**-0.5
    reference = ReferenceKernels()
    ours = kernels.paged_attention(*case, scale, **options)
    theirs = reference.paged_attention(*case, scale, **options)
    exact = reference.paged_attention(*(item.float() for item in case[:3]), *case[3:], scale, **options)
    assert_as_good_as_torch(ours, theirs, exact)


@BOTH
@pytest.mark.parametrize("block_size", [16, 5])
@pytest.mark.parametrize("window", [None, 50])
def test_where_blocks_lie_does_not_matter(dtype: torch.dtype, block_size: int, window: int | None, kernels: Kernels):
    """Or an answer would depend on what was freed before: the same bits, also where blocks are neighbours."""
    qkv, *caches, tables, bounds, lens = attention_case(dtype, 9, 3, 64, block_size)
    num_blocks, attended = len(caches[0]), []
    used = [table[: -(-int(length) // block_size)] for table, length in zip(tables, lens, strict=True)]
    in_order = torch.cat([*used, torch.tensor([i for i in range(num_blocks) if i not in torch.cat(used)])])
    for places in (torch.arange(num_blocks), torch.argsort(in_order)):  # as they are, and one after another
        moved = [torch.empty_like(cache).index_copy_(0, places, cache) for cache in caches]
        tables_there = places.int()[tables.long()]
        attended.append(kernels.paged_attention(qkv, *moved, tables_there, bounds, lens, 0.125, window=window))
    assert torch.equal(*attended)


@BOTH
@pytest.mark.parametrize("head_dim", [16, 64, 96])
def test_rope_store(dtype: torch.dtype, head_dim: int, kernels: Kernels):
    num_heads, num_kv_heads, num_tokens = 6, 2, 40
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    table = rope_table(torch.rand(head_dim // 2), 200)
    positions, slots = torch.randint(0, 200, (num_tokens,)), torch.randperm(64)[:num_tokens]
    results = []
    for implementation, work in ((kernels, dtype), (ReferenceKernels(), dtype), (ReferenceKernels(), torch.float32)):
        rotated = qkv.to(work).clone()
        caches = [torch.zeros(8, 8, num_kv_heads, head_dim, dtype=work) for _ in range(2)]
        implementation.rope_store(rotated, positions, table, *caches, slots)
        results.append(torch.cat([rotated.flatten(), *(cache.flatten() for cache in caches)]))
    assert_as_good_as_torch(*results)


@BOTH
@pytest.mark.parametrize("delta_dtype", [None, torch.float32, "same"])
def test_add_rms_norm(dtype: torch.dtype, delta_dtype: Any, kernels: Kernels):
    x, weight = torch.randn(50, 96), torch.rand(96)
    delta = None if delta_dtype is None else torch.randn(50, 96).to(dtype if delta_dtype == "same" else delta_dtype)
    ours, theirs = x.clone(), x.clone()
    normed = kernels.add_rms_norm(ours, delta, weight, 1e-5, dtype)
    expected = ReferenceKernels().add_rms_norm(theirs, delta, weight, 1e-5, dtype)
    exact = ReferenceKernels().add_rms_norm(x.clone(), delta, weight, 1e-5, torch.float32)
    assert torch.equal(ours, theirs), "the residual stream"
    assert normed.dtype == dtype
    assert_as_good_as_torch(normed, expected, exact)


@BOTH
@pytest.mark.parametrize("gelu", [False, True])
def test_gated_activation(dtype: torch.dtype, gelu: bool, kernels: Kernels):
    gate_up = (4 * torch.randn(30, 160)).to(dtype)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, -1e4, 1e4]).to(dtype)
    reference = ReferenceKernels()
    exact = reference.gated_activation(gate_up.float(), gelu=gelu)
    ours = kernels.gated_activation(gate_up, gelu=gelu)
    assert_as_good_as_torch(ours, reference.gated_activation(gate_up, gelu=gelu), exact)


@BOTH
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 11, 12, 13, 16, 17, 31, 32, 33, 47, 48, 49, 100])
@pytest.mark.parametrize(("depth", "num_out"), [(64, 96), (96, 49), (32, 7), (80, 33), (144, 1), (48, 320)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(dtype: torch.dtype, num_rows: int, depth: int, num_out: int, has_bias: bool, kernels: Kernels):
    """Rows and outputs around every edge of tiles, panels and blocks; none, when no sequence reaches its end."""
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, depth, generator=generator).to(dtype)
    weight = torch.randn(num_out, depth, generator=generator).to(dtype)
    bias = torch.randn(num_out, generator=generator).to(dtype) if has_bias else None
    wide = kernels.prepare_linear(weight, bias, dtype=torch.float32)(x)
    ours = kernels.prepare_linear(weight, bias)(x)
    theirs = ReferenceKernels().prepare_linear(weight, bias)(x)
    exact = ReferenceKernels().prepare_linear(weight.float(), None if bias is None else bias.float())(x.float())
    assert (ours.dtype, wide.dtype) == (dtype, torch.float32)
    assert_as_good_as_torch(ours, theirs, exact)
    assert_as_good_as_torch(wide, theirs, exact)


@BOTH
@pytest.mark.parametrize("depth", [64, 80])
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype, depth: int, kernels: Kernels):
    """Or an answer would depend on whose requests run beside it: the same bits, whatever the batch."""
    linear = kernels.prepare_linear(torch.randn(96, depth).to(dtype), dtype=torch.float32)
    x = torch.randn(70, depth).to(dtype)
    alone = torch.cat([linear(row[None]) for row in x])
    for num_rows in (2, 13, 17, 40, 70):
        assert torch.equal(linear(x[:num_rows].contiguous()), alone[:num_rows])


def test_torch_may_use_the_same_registers_in_between(kernels: Kernels):
    """Its own products set up tile registers as they need them, in the same threads."""
    weight, x = torch.randn(128, 128).bfloat16(), torch.randn(40, 128).bfloat16()
    linear = kernels.prepare_linear(weight)
    ours, theirs = linear(x), x @ weight.T
    for num_rows in (40, 3, 40, 17):
        assert torch.equal(linear(x[:num_rows].contiguous()), ours[:num_rows])
        assert torch.equal(x @ weight.T, theirs)


def test_wrong_shapes_are_refused_not_read_out_of_bounds(kernels: Kernels):
    """A position or slot beyond its table would write into other memory."""
    table, caches = rope_table(torch.rand(8), 10), [torch.zeros(2, 4, 1, 16) for _ in range(2)]
    qkv = torch.zeros(1, 3 * 16)
    for position, slot in ((10, 0), (-1, 0), (0, 8), (0, -1)):
        with pytest.raises(RuntimeError):
            kernels.rope_store(qkv, torch.tensor([position]), table, *caches, torch.tensor([slot]))
    with pytest.raises(RuntimeError):
        kernels.add_rms_norm(torch.zeros(1, 20), None, torch.ones(20), 1e-5, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "shape", "reason"),
    [
        (torch.float16, {}, "float16"),
        (torch.float32, {"head_dim": 24}, "head_dim=24"),
        (torch.float32, {"hidden_size": 100}, "hidden_size=100"),
        (torch.float32, {}, None),
    ],
)
def test_models_that_do_not_fit_are_refused_by_name(dtype: torch.dtype, shape: dict[str, int], reason: str | None):
    refusal = CPUKernels.refusal(dtype, **({"head_dim": 64, "hidden_size": 64, "intermediate_size": 64} | shape))
    assert refusal is None if reason is None else reason in str(refusal)
