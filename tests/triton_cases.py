"""Inputs for the Triton kernels, and the rule by which their results are judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionCase:
    """Arguments of ``Kernels.paged_attention`` up to the scale, in order, and how many rows are no padding."""

    tensors: tuple[Tensor, ...]
    num_rows: int

    def float(self) -> tuple[Tensor, ...]:
        return (*(item.float() for item in self.tensors[:3]), *self.tensors[3:])


def attention_case(
    lengths: Sequence[tuple[int, int]],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    num_padded: int = 0,
) -> AttentionCase:
    """Sequences of (new tokens, all tokens) over shuffled blocks; what no sequence owns is NaN.

    Args:
        num_padded: Sequences behind the others that have one row each and no tokens, as in a padded batch.
    """
    generator = torch.Generator().manual_seed(0)
    counts = [-(-total // block_size) for _, total in lengths]
    free = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    caches = [torch.full((len(free), block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype) for _ in range(2)]
    # Beyond a sequence's blocks stands one that does not exist: reading it would end the process.
    tables = torch.full((len(lengths) + num_padded, max(counts) + 1), 2**30, dtype=torch.int32)
    for i, (_, total) in enumerate(lengths):
        tables[i, : counts[i]] = torch.tensor([free.pop() for _ in range(counts[i])], dtype=torch.int32)
        slots = torch.tensor([int(tables[i, j // block_size]) * block_size + j % block_size for j in range(total)])
        for cache in caches:
            kv = torch.randn(total, num_kv_heads, head_dim, generator=generator).to(dtype)
            cache.view(-1, num_kv_heads, head_dim)[slots] = kv
    num_rows = sum(new for new, _ in lengths)
    bounds = torch.tensor([0, *(new for new, _ in lengths), *[1] * num_padded]).cumsum(0).int()
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(num_rows + num_padded, width, generator=generator).to(dtype)
    lens = torch.tensor([*(total for _, total in lengths), *[0] * num_padded], dtype=torch.int32)
    return AttentionCase((qkv, *caches, tables, bounds, lens), num_rows)


def assert_as_good_as_torch(ours: Tensor, theirs: Tensor, exact: Tensor) -> None:
    """Our error against float32 is at most twice that of torch in the same precision, or float32's own rounding."""
    assert ours.shape == exact.shape
    assert torch.isfinite(ours).all()
    allowed = 2 * (theirs.float() - exact.float()).abs().max().item() + 2e-5 * exact.float().abs().max().item()
    assert (ours.float() - exact.float()).abs().max().item() <= allowed
