"""Paged attention on GPUs: single queries go to the decode kernel, longer ones to the prefill kernel.

In a mixed batch both run over all sequences, and each leaves the other's alone: which sequence is which is known on the
device only, and asking would wait for it.
"""

from __future__ import annotations

from torch import Tensor

from .attention_decode import plan_decode
from .attention_prefill import plan_prefill
from .call import KernelCall, next_power_of_2
from .launch import DecodeLaunch, PrefillLaunch, decode_launch, prefill_launch

__all__ = ["paged_attention", "plan_paged_attention"]


def plan_paged_attention(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    decode: DecodeLaunch | None = None,
    prefill: PrefillLaunch | None = None,
) -> list[KernelCall]:
    """The launches of ``Kernels.paged_attention``.

    Args:
        out: [num_tokens, num_heads * head_dim]; receives the result.
        decode, prefill: Launch parameters; None: from the table.
    """
    num_kv_heads, head_dim = key_cache.shape[2:]
    num_tokens, num_seqs = qkv.shape[0], seq_lens.shape[0]
    group = out.shape[1] // head_dim // num_kv_heads
    padded = max(16, next_power_of_2(head_dim))
    heads = {"num_kv_heads": num_kv_heads, "group": group, "head_dim": padded, "itemsize": key_cache.element_size()}
    tensors = {
        "qkv_ptr": qkv,
        "key_ptr": key_cache,
        "value_ptr": value_cache,
        "out_ptr": out,
        "tables_ptr": block_tables,
        "cu_seqlens_ptr": cu_seqlens_q,
        "seq_lens_ptr": seq_lens,
    }
    numbers = {
        "scale": scale,
        "soft_cap": soft_cap or 0.0,
        "window": window or 0,
        "qkv_stride": qkv.stride(0),
        "table_stride": block_tables.stride(0),
    }
    constants = {
        "NUM_HEADS": group * num_kv_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "PADDED": padded,
        "BLOCK_SIZE": key_cache.shape[1],
        "HAS_WINDOW": window is not None,
        "HAS_CAP": soft_cap is not None,
    }
    calls = []
    if num_tokens > num_seqs:
        is_plain = window is None and soft_cap is None
        chosen = prefill or prefill_launch(num_tokens=num_tokens, num_seqs=num_seqs, is_plain=is_plain, **heads)
        calls.append(plan_prefill(chosen, tensors, numbers, constants))
    # A single sequence with several queries has none that is alone.
    if num_tokens == num_seqs or num_seqs > 1:
        calls += plan_decode(decode or decode_launch(num_seqs=num_seqs, **heads), tensors, numbers, constants)
    return calls


def paged_attention(
    qkv: Tensor,
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
    """``Kernels.paged_attention``."""
    num_kv_heads, head_dim = key_cache.shape[2:]
    out = qkv.new_empty(qkv.shape[0], qkv.shape[1] - 2 * num_kv_heads * head_dim)
    tables = (block_tables, cu_seqlens_q, seq_lens)
    calls = plan_paged_attention(qkv, key_cache, value_cache, *tables, scale, out, window=window, soft_cap=soft_cap)
    for call in calls:
        call.launch()
    return out
