"""What the machine and single operations can do: the bounds that an engine's figures are compared with.

All of this runs in the engine's own thread: OpenMP keeps a pool of threads for each thread that computes, and a second
pool would slow down the first.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedllm_kernels.bandwidth import make_buffer, readers

from ..api import SamplingParams
from ..compute.forward_batch import ForwardBatch
from ..compute.kv_cache import KVCache
from ..compute.model_runner import ModelRunner
from ..control.sequence import Sequence

__all__ = ["Contexts", "LinearLayers", "ReadBandwidth", "fastest"]

_BUFFER_BYTES = 256 * 2**20


def fastest(function: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of several calls: whatever else the machine does only adds to them."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


class ReadBandwidth:
    """How fast a buffer far larger than the caches is read in order by all threads."""

    def __init__(self) -> None:
        self._buffer = make_buffer(_BUFFER_BYTES)
        self._readers = readers()

    def measure(self, repeats: int) -> dict[str, float]:
        """Bytes per second of the best repeat, by the name of the reader."""
        return {
            name: self._buffer.nbytes / fastest(functools.partial(read, self._buffer), repeats)
            for name, read in self._readers.items()
        }


class LinearLayers:
    """The linear layers of a model, one after the other and nothing else, each as an operation of its own."""

    def __init__(self, runner: ModelRunner) -> None:
        self._layers, self._head = runner.decoder.products()
        self._dtype = runner.dtype

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of weights that one token's linear layers read."""
        products = [*self._layers, self._head]
        return sum(item.num_inputs * item.num_outputs for item in products) * self._dtype.itemsize

    def measure(self, num_rows: int, *, num_head_rows: int, repeats: int) -> float:
        """Seconds for so many rows, of which some go through the head as well."""
        sizes = {item.num_inputs for item in (*self._layers, self._head)}
        inputs = {size: torch.randn(num_rows, size).to(self._dtype) for size in sizes}
        last = inputs[self._head.num_inputs][:num_head_rows]

        @torch.inference_mode()
        def run() -> None:
            for item in self._layers:
                item.linear(inputs[item.num_inputs])
            self._head.linear(last)

        return fastest(run, repeats)


@dataclass(frozen=True, kw_only=True)
class ContextTimes:
    """One step that decodes a token for each of some sequences of equal length.

    Args:
        step_s: Of the whole forward pass.
        kernel_s: Of it, by operation.
        attention_alone_s: Of the attention of all layers, one after the other and nothing else.
        num_kv_bytes: KV that the step reads.
    """

    step_s: float
    kernel_s: dict[str, float]
    attention_alone_s: float
    num_kv_bytes: int


class Contexts:
    """Decode steps at given context lengths, over KV of its own that is in memory but not computed.

    Its blocks are in random order, as they are in an engine that has run for a while.
    """

    def __init__(self, runner: ModelRunner, *, batch_size: int, max_context: int) -> None:
        self._runner = runner
        self._batch_size = batch_size
        self._block_size = runner.kv_cache.block_size
        self._blocks_each = -(-(max_context + 1) // self._block_size)
        num_blocks = batch_size * self._blocks_each
        self._cache = KVCache(
            runner.model_config, num_blocks=num_blocks, block_size=self._block_size, dtype=runner.dtype
        )
        for layer in (*self._cache.keys, *self._cache.values):
            layer.fill_(0.5)  # pages that were never written would all be one page of zeros
        self._block_ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()

    def measure(self, context: int, *, seconds_by_kernel: dict[str, float], repeats: int) -> ContextTimes:
        """Time steps whose sequences have ``context`` tokens each, the new one included.

        Args:
            seconds_by_kernel: Where the runner's timed kernels add up their seconds; emptied before each step.
        """
        batch = self._batch(context)
        best: tuple[float, dict[str, float]] | None = None
        for _ in range(repeats):
            seconds_by_kernel.clear()
            start = time.perf_counter()
            with torch.inference_mode():
                self._runner.decoder.forward(batch, self._cache)
            step_s = time.perf_counter() - start
            if best is None or step_s < best[0]:
                best = (step_s, dict(seconds_by_kernel))
        assert best is not None
        return ContextTimes(
            step_s=best[0],
            kernel_s=best[1],
            attention_alone_s=fastest(lambda: self._attend(batch), repeats),
            num_kv_bytes=self._batch_size * context * self._runner.bytes_per_token,
        )

    @torch.inference_mode()
    def _attend(self, batch: ForwardBatch) -> None:
        config = self._runner.model_config
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        qkv: Tensor = torch.ones(self._batch_size, width, dtype=self._runner.dtype)
        tables = (batch.block_tables, batch.cu_seqlens_q, batch.seq_lens)
        for key_cache, value_cache in zip(self._cache.keys, self._cache.values, strict=True):
            self._runner.kernels.paged_attention(qkv, key_cache, value_cache, *tables, config.attention_scale)

    def _batch(self, context: int) -> ForwardBatch:
        sequences = []
        for i in range(self._batch_size):
            table = self._block_ids[i * self._blocks_each : (i + 1) * self._blocks_each]
            sequence = Sequence(
                request_id=str(i),
                token_ids=[0] * context,
                num_prompt_tokens=context,
                max_tokens=1,
                sampling=SamplingParams(temperature=0),
                seed=0,
                eos_token_ids=frozenset(),
                num_computed_tokens=context - 1,
                block_table=table,
            )
            sequences.append(sequence)
        return ForwardBatch.build(sequences, [1] * len(sequences), self._block_size)
