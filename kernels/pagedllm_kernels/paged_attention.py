"""Attention over a paged KV cache (Kwon et al., 2023, arXiv 2309.06180), for any mix of query lengths."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .activation import soft_cap as apply_soft_cap

__all__ = ["paged_attention"]


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Causal attention of each sequence's newest tokens to all of its KV, their own included.

    Sequence ``i`` has the queries ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1]``; they are the last tokens of its
    ``seq_lens[i]`` positions, whose KV is in the cache already. One new token is decode, all of them a whole prefill,
    anything between a chunk.

    Args:
        query: [num_tokens, num_heads, head_dim].
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim].
        value_cache: As ``key_cache``.
        block_tables: [num_seqs, max_num_blocks] int32; entries past a sequence's length are not read.
        cu_seqlens_q: [num_seqs + 1] int32, running sum of the query lengths.
        seq_lens: [num_seqs] int32, at least each sequence's query length.
        scale: Of the scores, usually ``head_dim ** -0.5``.
        window: A token sees only so many of the newest tokens, itself included; blocks that no query sees are not
            read. None: all.
        soft_cap: Scaled scores ``s`` become ``soft_cap * tanh(s / soft_cap)``. None: no cap.

    Returns:
        [num_tokens, num_heads, head_dim].
    """
    block_size = key_cache.shape[1]
    bounds = cu_seqlens_q.tolist()
    output = torch.empty_like(query)
    for i, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(bounds[i], bounds[i + 1])
        # The first position that any of the queries sees, and its block.
        first = 0 if window is None else max(seq_len - (bounds[i + 1] - bounds[i]) + 1 - window, 0)
        first_block = first // block_size
        seen = slice(first - first_block * block_size, seq_len - first_block * block_size)
        blocks = block_tables[i, first_block : -(-seq_len // block_size)]
        key = key_cache.index_select(0, blocks).flatten(0, 1)[seen]  # [num_seen, num_kv_heads, head_dim]
        value = value_cache.index_select(0, blocks).flatten(0, 1)[seen]
        if soft_cap is None:
            output[rows] = _attend(query[rows], key, value, scale, window)
        else:
            output[rows] = _attend_capped(query[rows], key, value, scale, window, soft_cap)
    return output


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """Attention of one sequence: [query_len, num_heads, head_dim] over [num_seen, num_kv_heads, head_dim]."""
    query_len, num_heads, head_dim = query.shape
    num_seen, num_kv_heads, _ = key.shape
    if query_len == 1:
        # The query heads that share a KV head become the rows of one small matrix: KV is not repeated for them.
        rows = query.view(num_kv_heads, num_heads // num_kv_heads, head_dim)
        attended = functional.scaled_dot_product_attention(
            rows.unsqueeze(0), key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0), scale=scale
        )
        return attended.view(1, num_heads, head_dim)
    is_causal = query_len == num_seen and (window is None or window >= num_seen)
    attended = functional.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        attn_mask=None if is_causal else _mask(query_len, num_seen, window),
        is_causal=is_causal,
        scale=scale,
        enable_gqa=True,
    )
    return attended.squeeze(0).transpose(0, 1)


def _attend_capped(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float) -> Tensor:
    """As ``_attend``, written out in float32: scaled_dot_product_attention knows no cap."""
    query_len, num_heads, head_dim = query.shape
    num_seen, num_kv_heads, _ = key.shape
    # [num_kv_heads, heads per KV head, query_len, head_dim], and KV with one dimension of 1 for the second.
    queries = query.float().view(query_len, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    keys, values = (x.float().transpose(0, 1).unsqueeze(1) for x in (key, value))
    scores = apply_soft_cap(queries @ keys.transpose(2, 3) * scale, cap)
    scores = scores.masked_fill(~_mask(query_len, num_seen, window), -torch.inf)
    attended = torch.softmax(scores, dim=-1) @ values
    return attended.permute(2, 0, 1, 3).reshape(query_len, num_heads, head_dim).to(query.dtype)


def _mask(query_len: int, num_seen: int, window: int | None) -> Tensor:
    """Which of the seen positions each query sees, [query_len, num_seen] bool."""
    ahead = torch.arange(num_seen) - (num_seen - query_len)  # position relative to the first query
    own = torch.arange(query_len).unsqueeze(1)
    mask = ahead <= own
    return mask if window is None else mask & (ahead > own - window)
