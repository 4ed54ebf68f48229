"""CUDA graphs for decode: a step's hundreds of launches recorded once, and replayed by one call.

A graph has fixed addresses and a fixed number of rows. There is one for each of a few batch sizes, over one set of
buffers; a batch is copied into them and padded to the next size. Padding is harmless by its values: a sequence of no
tokens, whose only row has no slot, so that it stores nothing and sees nothing.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .forward_batch import ForwardBatch

__all__ = ["Capture", "DecodeGraphs", "Graph", "batch_sizes", "cuda_capture"]

logger = logging.getLogger(__name__)

_SIZE_STEP = 16


@dataclass(frozen=True, slots=True)
class Graph:
    """A recorded computation.

    Attributes:
        replay: Runs it again on what its inputs hold now.
        output: Where each run leaves its result.
    """

    replay: Callable[[], None]
    output: Tensor


Capture = Callable[[Callable[[], Tensor]], Graph]
"""Records a computation whose tensors stay where they are."""


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Sizes to record: powers of 2 up to 8, where a row more or less is felt, then every 16; the largest last."""
    sizes = [size for size in (1, 2, 4, 8) if size < max_num_seqs]
    return [*sizes, *range(_SIZE_STEP, max_num_seqs, _SIZE_STEP), max_num_seqs]


class DecodeGraphs:
    """Runs decode batches by replaying graphs. Owned by the thread that made it.

    Args:
        forward: The forward pass; its result depends on the batch's values and on nothing that moves.
        capture: Records it.
        max_num_seqs: Largest batch.
        max_num_blocks: Of a sequence.
        device: Of the buffers.
    """

    def __init__(
        self,
        forward: Callable[[ForwardBatch], Tensor],
        capture: Capture,
        *,
        max_num_seqs: int,
        max_num_blocks: int,
        device: torch.device,
    ) -> None:
        start = time.monotonic()
        self._buffers = _padding(max_num_seqs, max_num_blocks, device)
        self._sizes = batch_sizes(max_num_seqs)
        self._graphs: dict[int, Graph] = {}
        # The largest first: the others then fit into the memory that it took, and leave their logits in its own. With
        # 20 sizes and 150,000 tokens, logits of their own would be over a gigabyte that nobody has counted.
        logits: Tensor | None = None
        for size in reversed(self._sizes):
            self._graphs[size] = capture(partial(_compute, forward, _head_of(self._buffers, size), logits))
            logits = self._graphs[self._sizes[-1]].output
        logger.info("recorded CUDA graphs of %d batch sizes in %.1f s", len(self._sizes), time.monotonic() - start)

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether every sequence has one new token and yields logits, and there are not too many."""
        num_seqs = batch.seq_lens.shape[0]
        is_decode = batch.input_ids.shape[0] == num_seqs == batch.logits_indices.shape[0] and not batch.prompt_rows
        return is_decode and num_seqs <= self._sizes[-1]

    def run(self, batch: ForwardBatch) -> Tensor:
        """Logits of a batch that fits, [num_seqs, vocab_size]; valid until the next call."""
        num_seqs = batch.seq_lens.shape[0]
        size = self._sizes[bisect_left(self._sizes, num_seqs)]
        self._fill(batch, num_seqs, size)
        graph = self._graphs[size]
        graph.replay()
        return graph.output[:num_seqs]

    def _fill(self, batch: ForwardBatch, num_seqs: int, size: int) -> None:
        """Copy a batch into the buffers, and make padding of the rows behind it that the graph will look at."""
        buffers = self._buffers
        buffers.input_ids[:num_seqs] = batch.input_ids
        buffers.positions[:num_seqs] = batch.positions
        buffers.slot_mapping[:num_seqs] = batch.slot_mapping
        buffers.seq_lens[:num_seqs] = batch.seq_lens
        buffers.block_tables[:num_seqs, : batch.block_tables.shape[1]] = batch.block_tables
        buffers.input_ids[num_seqs:size] = 0
        buffers.positions[num_seqs:size] = 0
        buffers.slot_mapping[num_seqs:size] = -1
        buffers.seq_lens[num_seqs:size] = 0


def _compute(forward: Callable[[ForwardBatch], Tensor], batch: ForwardBatch, out: Tensor | None) -> Tensor:
    """The forward pass, its result in the first rows of ``out`` if there is one."""
    logits = forward(batch)
    return logits if out is None else out[: len(logits)].copy_(logits)


def _padding(num_seqs: int, max_num_blocks: int, device: torch.device) -> ForwardBatch:
    """A batch of nothing but padding."""
    rows = torch.arange(num_seqs, device=device)
    return ForwardBatch(
        input_ids=torch.zeros_like(rows),
        positions=torch.zeros_like(rows),
        slot_mapping=torch.full_like(rows, -1),
        block_tables=torch.zeros(num_seqs, max_num_blocks, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32, device=device),
        seq_lens=torch.zeros(num_seqs, dtype=torch.int32, device=device),
        logits_indices=rows,
    )


def _head_of(batch: ForwardBatch, size: int) -> ForwardBatch:
    """The first sequences of a decode batch, in the same memory."""
    return ForwardBatch(
        input_ids=batch.input_ids[:size],
        positions=batch.positions[:size],
        slot_mapping=batch.slot_mapping[:size],
        block_tables=batch.block_tables[:size],
        cu_seqlens_q=batch.cu_seqlens_q[: size + 1],
        seq_lens=batch.seq_lens[:size],
        logits_indices=batch.logits_indices[:size],
    )


def cuda_capture() -> Capture:
    """Records on the current GPU; all graphs share one pool of memory, since only one runs at a time."""
    pool = torch.cuda.graph_pool_handle()

    def capture(compute: Callable[[], Tensor]) -> Graph:
        # Once in earnest, on a stream of its own: kernels are compiled and libraries set up before the recording.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            output = compute()
        return Graph(graph.replay, output)

    return capture
