"""Sampling without sorting: bounds by counting, then the best of scaled logits plus noise.

The same definition as the reference ``sampling.sample``: a token stays if it is near enough to the best (min-p), among
the ``k`` nearest (top-k), and if those nearer than it weigh less than ``top_p`` of what is left (top-p). Each bound is
the least distance whose count or weight reaches a goal. It is found bit by bit: non-negative floats are ordered like
their bits, so sixteen looks at the row settle two bits each. Weights are summed as whole numbers of 2**-40, so that the
sum does not depend on an order. The noise is the reference's, bit for bit, in float64.

One program per row: a row of 152,000 logits is 0.6 MB and read up to 34 times, from the second-level cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .call import KernelCall

__all__ = ["plan_sample", "sample"]

_COLUMNS_PER_LOOK = 4096
_WEIGHT_ONE = tl.constexpr(2.0**40)


@triton.jit
def _mix(bits):
    """MurmurHash3's finaliser (Appleby, 2011), on uint32, whose products wrap."""
    bits = bits ^ (bits >> 16)
    bits = bits * tl.full([1], 0x85EBCA6B, tl.uint32)
    bits = bits ^ (bits >> 13)
    bits = bits * tl.full([1], 0xC2B2AE35, tl.uint32)
    return bits ^ (bits >> 16)


@triton.jit
def _gumbel_noise(tokens, first_key, second_key):
    """The reference's ``gumbel_noise`` of some tokens, float64."""
    bits = tokens.to(tl.uint32) * tl.full([1], 0x9E3779B9, tl.uint32) + first_key
    bits = _mix(_mix(bits) ^ second_key)
    uniform = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2**-32
    return -tl.log(-tl.log(uniform))


@triton.jit
def _distances(logits_ptr, tokens, best, temperature, vocab_size):
    """How far tokens are below the best, scaled; inf beyond the vocabulary. Rounded as torch rounds it."""
    logits = tl.load(logits_ptr + tokens, mask=tokens < vocab_size, other=float("-inf"))
    return tl.abs(tl.div_rn(best - logits, temperature))  # -0 below 0 is a distance of -0, whose bits are large


@triton.jit
def _amounts(distances, limit, BY_WEIGHT: tl.constexpr):
    """What each token adds: 1, or its weight; 0 beyond the limit."""
    amounts = tl.where(distances.to(tl.uint32, bitcast=True) <= limit, 1.0, 0.0)
    if BY_WEIGHT:
        amounts = amounts * tl.exp(-distances) * _WEIGHT_ONE
    return amounts.to(tl.int64)


@triton.jit
def _find_bound(logits_ptr, best, temperature, vocab_size, limit, goal, BY_WEIGHT: tl.constexpr, COLUMNS: tl.constexpr):
    """The bits of the least distance within which the tokens up to ``limit`` count, or weigh, at least ``goal``."""
    prefix = limit * 0
    unit = limit * 0 + 0x40000000
    for _ in range(16):
        # The largest values with the bits settled so far and 0, 1 or 2 as the next two.
        edge_0 = prefix + unit - 1
        edge_1 = edge_0 + unit
        edge_2 = edge_1 + unit
        within_0 = tl.zeros([COLUMNS], tl.int64)
        within_1 = tl.zeros([COLUMNS], tl.int64)
        within_2 = tl.zeros([COLUMNS], tl.int64)
        for first in range(0, vocab_size, COLUMNS):
            tokens = first + tl.arange(0, COLUMNS)
            distances = _distances(logits_ptr, tokens, best, temperature, vocab_size)
            amounts = _amounts(distances, limit, BY_WEIGHT)
            bits = distances.to(tl.uint32, bitcast=True)
            within_0 += tl.where(bits <= edge_0, amounts, 0)
            within_1 += tl.where(bits <= edge_1, amounts, 0)
            within_2 += tl.where(bits <= edge_2, amounts, 0)
        prefix += unit * (tl.sum(within_0, axis=0) < goal).to(tl.uint32)
        prefix += unit * (tl.sum(within_1, axis=0) < goal).to(tl.uint32)
        prefix += unit * (tl.sum(within_2, axis=0) < goal).to(tl.uint32)
        unit = unit >> 2
    return prefix


# fmt: off
@triton.jit
def _sample_kernel(
    logits_ptr, temperatures_ptr, top_ks_ptr, top_ps_ptr, max_distances_ptr, keys_ptr, token_ids_ptr, vocab_size,
    COLUMNS: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * vocab_size
    temperature = tl.load(temperatures_ptr + row)
    top_k = tl.load(top_ks_ptr + row)
    top_p = tl.load(top_ps_ptr + row)
    highest = tl.full([COLUMNS], float("-inf"), tl.float32)
    for first in range(0, vocab_size, COLUMNS):
        tokens = first + tl.arange(0, COLUMNS)
        highest = tl.maximum(highest, tl.load(logits_ptr + tokens, mask=tokens < vocab_size, other=float("-inf")))
    best = tl.max(highest, axis=0)

    limit = tl.load(max_distances_ptr + row).to(tl.uint32, bitcast=True)
    if top_k < vocab_size:
        everything = limit * 0 + 0x7F800000  # inf
        nearest = _find_bound(logits_ptr, best, temperature, vocab_size, everything, top_k, False, COLUMNS)
        limit = tl.minimum(limit, nearest)
    if top_p < 1.0:
        weights = tl.zeros([COLUMNS], tl.int64)
        for first in range(0, vocab_size, COLUMNS):
            tokens = first + tl.arange(0, COLUMNS)
            weights += _amounts(_distances(logits_ptr, tokens, best, temperature, vocab_size), limit, True)
        goal = tl.ceil(tl.sum(weights, axis=0).to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
        heaviest = _find_bound(logits_ptr, best, temperature, vocab_size, limit, goal, True, COLUMNS)
        limit = tl.minimum(limit, heaviest)

    first_key = tl.load(keys_ptr + 2 * row).to(tl.uint32)
    second_key = tl.load(keys_ptr + 2 * row + 1).to(tl.uint32)
    scores = tl.full([COLUMNS], float("-inf"), tl.float64)
    chosen = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, vocab_size, COLUMNS):
        tokens = first + tl.arange(0, COLUMNS)
        distances = _distances(logits_ptr, tokens, best, temperature, vocab_size)
        is_kept = (distances.to(tl.uint32, bitcast=True) <= limit) & (tokens < vocab_size)
        noisy = _gumbel_noise(tokens, first_key, second_key) - distances.to(tl.float64)
        is_better = is_kept & (noisy > scores)
        scores = tl.where(is_better, noisy, scores)
        chosen = tl.where(is_better, tokens, chosen)
    token_id = tl.min(tl.where(scores == tl.max(scores, axis=0), chosen, vocab_size), axis=0)
    tl.store(token_ids_ptr + row, token_id.to(tl.int64))


def plan_sample(
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    max_distances: Tensor,
    keys: Tensor,
    token_ids: Tensor,
) -> KernelCall:
    """As ``sample``.

    Args:
        max_distances: [num_rows] float32, how far below the best a scaled logit may be.
        token_ids: [num_rows] int64; receives the result.
    """
    return KernelCall(
        kernel=_sample_kernel,
        grid=(logits.shape[0],),
        args={
            "logits_ptr": logits,
            "temperatures_ptr": temperatures,
            "top_ks_ptr": top_ks,
            "top_ps_ptr": top_ps,
            "max_distances_ptr": max_distances,
            "keys_ptr": keys,
            "token_ids_ptr": token_ids,
            "vocab_size": logits.shape[1],
        },
        constants={"COLUMNS": _COLUMNS_PER_LOOK},
        # 8 columns a thread: three sums of 8 bytes each are 48 registers, and one program has a whole multiprocessor's
        # bandwidth to the cache.
        num_warps=16,
    )


def sample(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, keys: Tensor
) -> Tensor:
    """As the reference ``sampling.sample``; what is not on the device of ``logits`` is copied there."""
    move = [item.to(logits.device, non_blocking=True) for item in (temperatures, top_ks, top_ps, min_ps, keys)]
    temperatures, top_ks, top_ps, min_ps, keys = move
    token_ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    plan_sample(logits.contiguous(), temperatures, top_ks, top_ps, -min_ps.log(), keys, token_ids).launch()
    return token_ids
