"""Everything that one forward pass takes as input; there is no other channel to the model."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..control.sequence import Sequence

__all__ = ["ForwardBatch", "PromptRow"]


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A row of logits that scores a prompt token: the one at ``position``, given all before it."""

    sequence: Sequence
    position: int


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """New tokens of several sequences, packed one after the other without padding.

    Attributes:
        input_ids: [num_tokens] int64.
        positions: [num_tokens] int64, each token's place in its sequence.
        slot_mapping: [num_tokens] int64, where its KV goes: ``block_id * block_size + offset``.
        block_tables: [num_seqs, max_num_blocks] int32, padded with 0 (never read).
        cu_seqlens_q: [num_seqs + 1] int32, running sum of new tokens.
        seq_lens: [num_seqs] int32, tokens whose KV exists after this pass.
        logits_indices: [num_logits] int64, the rows that yield logits: first one per sampled sequence, then one per
            entry of ``prompt_rows``.
        prompt_rows: Prompt tokens to score.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    logits_indices: Tensor
    prompt_rows: tuple[PromptRow, ...] = ()

    @classmethod
    def build(cls, sequences: List[Sequence], nums_new_tokens: List[int], block_size: int) -> ForwardBatch:
        """Pack a step's work: so many new tokens of each sequence."""
        input_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        cu_seqlens_q = [0]
        seq_lens: list[int] = []
        logits_indices: list[int] = []
        prompt_indices: list[int] = []
        prompt_rows: list[PromptRow] = []
        for sequence, num_new_tokens in zip(sequences, nums_new_tokens, strict=True):
            start = sequence.num_computed_tokens
            end = start + num_new_tokens
            if sequence.needs_all_prompt_logits:
                scored = range(start + 1, min(end + 1, sequence.num_prompt_tokens))
                prompt_rows.extend(PromptRow(sequence, position) for position in scored)
                prompt_indices.extend(len(input_ids) + position - start - 1 for position in scored)
            input_ids.extend(sequence.token_ids[start:end])
            positions.extend(range(start, end))
            table = sequence.block_table
            slots.extend(table[i // block_size] * block_size + i % block_size for i in range(start, end))
            cu_seqlens_q.append(cu_seqlens_q[-1] + num_new_tokens)
            seq_lens.append(end)
            if sequence.generates and end == len(sequence.token_ids):
                logits_indices.append(cu_seqlens_q[-1] - 1)
        return cls(
            input_ids=_tensor(input_ids, np.int64),
            positions=_tensor(positions, np.int64),
            slot_mapping=_tensor(slots, np.int64),
            block_tables=_pad([sequence.block_table for sequence in sequences]),
            cu_seqlens_q=_tensor(cu_seqlens_q, np.int32),
            seq_lens=_tensor(seq_lens, np.int32),
            logits_indices=_tensor(logits_indices + prompt_indices, np.int64),
            prompt_rows=tuple(prompt_rows),
        )


def _tensor(values: list[int], dtype: type[np.integer[Any]]) -> Tensor:
    # Through numpy, which takes a list of numbers in a quarter of the time.
    return torch.from_numpy(np.array(values, dtype=dtype))


def _pad(tables: List[List[int]]) -> Tensor:
    width = max(len(table) for table in tables)
    padded: list[int] = []
    for table in tables:
        padded += table
        padded += [0] * (width - len(table))
    return _tensor(padded, np.int32).view(len(tables), width)
