"""Paged attention and the KV store against attention over plain, contiguous KV."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedllm_kernels.kv_store import kv_store
from pagedllm_kernels.paged_attention import paged_attention


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Softmax attention written out, one query and head at a time, in float64."""
    num_queries, num_heads, _ = query.shape
    group = num_heads // key.shape[1]
    output = torch.empty(query.shape, dtype=torch.float64)
    for i in range(num_queries):
        visible = key.shape[0] - num_queries + i + 1
        first = 0 if window is None else max(visible - window, 0)
        for head in range(num_heads):
            keys, values = (x[first:visible, head // group].double() for x in (key, value))
            scores = keys @ query[i, head].double() * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            weights = torch.softmax(scores, dim=0)
            output[i, head] = weights @ values
    return output


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 1}, {"window": 4}, {"window": 50}, {"soft_cap": 0.5}, {"window": 3, "soft_cap": 0.5}],
    ids=str,
)
def test_any_mix_of_query_lengths(block_size: int, num_heads: int, num_kv_heads: int, options: dict[str, Any]):
    """Decode, whole prefill, chunk and a single token in one batch, over shuffled blocks; other blocks hold NaN."""
    generator = torch.Generator().manual_seed(0)
    head_dim, lengths = 8, [(1, 9), (7, 7), (5, 16), (1, 1), (3, 4)]  # (queries, all tokens)
    num_blocks = sum(-(-total // block_size) for _, total in lengths) + 3
    free = torch.randperm(num_blocks, generator=generator).tolist()
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    key_cache, value_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    tables, queries, expected = [], [], []
    for num_queries, total in lengths:
        table = [free.pop() for _ in range(-(-total // block_size))]
        slots = torch.tensor([table[i // block_size] * block_size + i % block_size for i in range(total)])
        key = torch.randn(total, num_kv_heads, head_dim, generator=generator)
        value = torch.randn(total, num_kv_heads, head_dim, generator=generator)
        kv_store(key, value, key_cache, value_cache, slots)
        # What no query sees must not be read either: it may be in a block that was never written.
        unseen = total - num_queries + 1 - options.get("window", total)
        key_cache.flatten(0, 1)[slots[: max(unseen, 0)]] = torch.nan
        value_cache.flatten(0, 1)[slots[: max(unseen, 0)]] = torch.nan
        query = torch.randn(num_queries, num_heads, head_dim, generator=generator)
        tables.append(table)
        queries.append(query)
        expected.append(plain_attention(query, key, value, 0.3, **options))
    width = max(map(len, tables))
    counts = torch.tensor([0, *(num_queries for num_queries, _ in lengths)])
    output = paged_attention(
        torch.cat(queries),
        key_cache,
        value_cache,
        torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        counts.cumsum(0).int(),
        torch.tensor([total for _, total in lengths], dtype=torch.int32),
        0.3,
        **options,
    )
    torch.testing.assert_close(output.double(), torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_the_store_touches_only_its_slots():
    key_cache, value_cache = torch.zeros(3, 2, 1, 2), torch.zeros(3, 2, 1, 2)
    kv_store(torch.ones(2, 1, 2), torch.full((2, 1, 2), 2.0), key_cache, value_cache, torch.tensor([5, 0]))
    assert key_cache.flatten(0, 1)[:, 0, 0].tolist() == [1, 0, 0, 0, 0, 1]
    assert value_cache.flatten(0, 1)[:, 0, 0].tolist() == [2, 0, 0, 0, 0, 2]
