"""What a request's parameters do to its logits before a token is chosen: bias, bans and penalties."""

from __future__ import annotations

from collections.abc import Sequence as List

import torch
from torch import Tensor

from ..control.sequence import Sequence

__all__ = ["adjust_logits"]


def adjust_logits(logits: Tensor, sequences: List[Sequence]) -> Tensor:
    """Apply each row's logit bias, banned tokens and penalties, in vLLM's order.

    Args:
        logits: [num_rows, vocab_size] float32; not changed.
        sequences: The rows' owners.

    Returns:
        [num_rows, vocab_size]: ``logits`` itself when no row asks for anything.
    """
    rows = [i for i, sequence in enumerate(sequences) if _is_adjusted(sequence)]
    if not rows:
        return logits
    adjusted = logits.clone()
    for i in rows:
        _adjust_row(adjusted[i], sequences[i])
    return adjusted


def _is_adjusted(sequence: Sequence) -> bool:
    params = sequence.sampling
    return bool(
        params.logit_bias
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or sequence.banned_token_ids
    )


def _adjust_row(row: Tensor, sequence: Sequence) -> None:
    params = sequence.sampling
    for token_id, bias in dict(params.logit_bias).items():
        row[token_id] += bias
    if sequence.banned_token_ids:
        row[sorted(sequence.banned_token_ids)] = float("-inf")
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sequence.token_ids, device=row.device).unique()
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        output = torch.tensor(sequence.output_token_ids, dtype=torch.int64, device=row.device)
        said, counts = output.unique(return_counts=True)
        row[said] -= params.presence_penalty + params.frequency_penalty * counts
