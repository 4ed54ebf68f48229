"""Choosing tokens from logits: greedy, or by temperature, top-k and top-p."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["draw", "greedy", "gumbel_noise", "sample"]


def greedy(logits: Tensor) -> Tensor:
    """The most probable token of each row; the lowest id among equals.

    Args:
        logits: [num_rows, vocab_size].

    Returns:
        [num_rows] int64.
    """
    return logits.argmax(dim=-1)


def draw(scaled: Tensor, keys: Tensor) -> Tensor:
    """The best of scaled logit + noise, [num_rows] int64.

    Args:
        scaled: [num_rows, vocab_size] float32, the best of a row 0, what the filters removed -inf.
        keys: [num_rows, 2] int64, the noise's.
    """
    return (scaled.double() + gumbel_noise(keys, scaled.shape[1])).argmax(dim=-1)


def sample(
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    keys: Tensor,
    *,
    draw: Callable[[Tensor, Tensor], Tensor] = draw,
) -> Tensor:
    """Draw one token per row by the Gumbel-max trick (Gumbel, 1954): the best of ``logit / temperature + noise``.

    Each token has noise of its own, a function of the row's key and the token id. A rounding difference in the logits
    then changes the outcome about as rarely as it changes the distribution. Inverting the cumulative distribution
    would need one number instead of many, but there every token's boundary moves with the sum of all before it, which
    changed one text in some dozens between batch sizes.

    Order of the filters as in vLLM: temperature, min-p (Nguyen et al., 2024, arXiv 2407.01082), top-k, then top-p on
    what remains (Holtzman et al., 2020, arXiv 1904.09751). Tokens equal to the last one kept are kept too, so that
    the result does not depend on a sort's order.

    Args:
        logits: [num_rows, vocab_size] float32.
        temperatures: [num_rows] float32, above 0.
        top_ks: [num_rows] int64, 1 to vocab_size.
        top_ps: [num_rows] float32, in (0, 1].
        min_ps: [num_rows] float32, in [0, 1].
        keys: [num_rows, 2] int64, each in [0, 2**32): the noise's key.
        draw: Does what the function ``draw`` does, faster.

    The other arguments may be on the CPU while the logits are not; they are copied there.

    Returns:
        [num_rows] int64.
    """
    move = [item.to(logits.device) for item in (temperatures, top_ks, top_ps, min_ps, keys)]
    temperatures, top_ks, top_ps, min_ps, keys = move
    # Subtracting the maximum first keeps tiny temperatures from overflowing to inf.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures.unsqueeze(1)
    rows = ((top_ks < logits.shape[1]) | (top_ps < 1) | (min_ps > 0)).nonzero().squeeze(1)
    if rows.numel() > 0:
        removed = scaled[rows] < _thresholds(scaled[rows], top_ks[rows], top_ps[rows], min_ps[rows])
        scaled[rows] = scaled[rows].masked_fill(removed, float("-inf"))
    return draw(scaled, keys)


_RANKED = 1024


def _thresholds(scaled: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor) -> Tensor:
    """The least scaled logit of each row that min-p, top-k and then top-p keep, [num_rows, 1].

    The best 1,024 tokens nearly always decide; a row is sorted as a whole only if they do not.
    """
    if scaled.shape[1] <= _RANKED:
        return _rank(scaled.sort(dim=-1, descending=True).values, None, top_ks, top_ps, min_ps)[0]
    ranked = scaled.topk(_RANKED, dim=-1).values
    thresholds, is_settled = _rank(ranked, scaled, top_ks, top_ps, min_ps)
    rows = (~is_settled).nonzero().squeeze(1)
    if rows.numel() > 0:
        ranked = scaled[rows].sort(dim=-1, descending=True).values
        thresholds[rows] = _rank(ranked, None, top_ks[rows], top_ps[rows], min_ps[rows])[0]
    return thresholds


def _rank(
    ranked: Tensor, scaled: Tensor | None, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor
) -> tuple[Tensor, Tensor]:
    """Thresholds by the best logits of each row, [num_rows, num_ranked], and whether these were enough, [num_rows].

    ``scaled`` are all logits of the rows; None: ``ranked`` are.
    """
    num_ranked = ranked.shape[1]
    # The best token's scaled logit is 0, so a share of its probability is a plain bound.
    least = ranked.gather(1, top_ks.clamp(max=num_ranked).unsqueeze(1) - 1)
    least = torch.where(top_ks.unsqueeze(1) <= num_ranked, least, float("-inf")).maximum(min_ps.log().unsqueeze(1))
    everything = ranked if scaled is None else scaled
    total = everything.masked_fill(everything < least, float("-inf")).double().exp().sum(dim=-1, keepdim=True)
    probs = ranked.masked_fill(ranked < least, float("-inf")).double().exp() / total
    sums = probs.cumsum(dim=-1)
    # A token is kept if those before it do not reach top_p yet; at least the first one always is.
    num_kept = (sums - probs < top_ps.unsqueeze(1)).sum(dim=-1, keepdim=True)
    is_enough = (top_ks.unsqueeze(1) <= num_ranked) | (ranked[:, -1:] < least)
    # Without a limit by rank, the total is right and the best may reach top_p.
    is_enough |= (top_ks.unsqueeze(1) >= everything.shape[1]) & (sums[:, -1:] >= top_ps.unsqueeze(1))
    return ranked.gather(1, num_kept - 1).maximum(least), is_enough.squeeze(1)


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise as a pure function of key and token id, the same on every device.

    The bits are two rounds of MurmurHash3's 32-bit finaliser (Appleby, 2011), one half of the key before each.

    Args:
        keys: [num_rows, 2] int64, each in [0, 2**32).
        vocab_size: Number of token ids.

    Returns:
        [num_rows, vocab_size] float64.
    """
    bits = torch.arange(vocab_size, device=keys.device) * 0x9E3779B9 + keys[:, :1]
    bits = _mix(_mix(bits & _MASK) ^ keys[:, 1:])
    uniform = (bits.double() + 0.5) / 2**32  # never 0 or 1
    return -(-uniform.log()).log()


_MASK = 2**32 - 1


def _mix(bits: Tensor) -> Tensor:
    """Spread every bit of 32 over all others. int64 products wrap, which leaves their low 32 bits right."""
    bits = bits ^ (bits >> 16)
    bits = bits * 0x85EBCA6B & _MASK
    bits = bits ^ (bits >> 13)
    bits = bits * 0xC2B2AE35 & _MASK
    return bits ^ (bits >> 16)
