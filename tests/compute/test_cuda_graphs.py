"""Bookkeeping of CUDA graphs, with a stand-in that computes again where a GPU would replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import write_hf_llama

from pagedllm.compute.cuda_device import move_batch
from pagedllm.compute.cuda_graphs import DecodeGraphs, Graph, batch_sizes
from pagedllm.compute.cuda_memory import largest_batch
from pagedllm.compute.forward_batch import ForwardBatch
from pagedllm.compute.model_runner import ModelRunner
from pagedllm.config import EngineConfig, StepLimits
from pagedllm.files.locate import locate_model

CPU = torch.device("cpu")


class FakeCapture:
    """Obeys ``Capture``: what was recorded runs over the same tensors, and leaves its result in the same place."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []
        self.replayed: list[int] = []

    def __call__(self, compute: Callable[[], torch.Tensor]) -> Graph:
        output = compute().clone()
        self.num_rows.append(len(output))

        def replay() -> None:
            self.replayed.append(len(output))
            output.copy_(compute())

        return Graph(replay, output)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = tmp_path_factory.mktemp("graphs")
    write_hf_llama(folder, num_layers=2)
    config = EngineConfig(
        model=str(folder), dtype="float32", kernels="triton", block_size=4, kv_cache_memory_bytes=2**17,
        max_num_seqs=6, max_model_len=32,
    )  # fmt: skip
    return ModelRunner(config, locate_model(str(folder)))


def decode_batch(lens: list[int]) -> ForwardBatch:
    """One token for each of several sequences, which have the blocks 2, 3, 4 and so on."""
    num_blocks = [-(-length // 4) for length in lens]
    firsts = [2 + sum(num_blocks[:i]) for i in range(len(lens))]
    tables = torch.zeros(len(lens), max(num_blocks), dtype=torch.int32)
    for i, (first, count) in enumerate(zip(firsts, num_blocks, strict=True)):
        tables[i, :count] = torch.arange(first, first + count)
    positions = torch.tensor(lens) - 1
    return ForwardBatch(
        input_ids=torch.arange(len(lens)) + 5,
        positions=positions,
        slot_mapping=torch.tensor(firsts) * 4 + positions,
        block_tables=tables,
        cu_seqlens_q=torch.arange(len(lens) + 1, dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        logits_indices=torch.arange(len(lens)),
    )


def pool_of(runner: ModelRunner) -> torch.Tensor:
    return torch.stack([*runner.kv_cache.keys, *runner.kv_cache.values])


def make_graphs(runner: ModelRunner, capture: FakeCapture) -> DecodeGraphs:
    forward: Any = lambda batch: runner.decoder.forward(batch, runner.kv_cache)  # noqa: E731
    return DecodeGraphs(forward, capture, max_num_seqs=6, max_num_blocks=8, device=CPU)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@torch.inference_mode()
def test_padded_batches_give_the_same_results_and_store_nothing_else(runner: ModelRunner):
    """Recording, or a padded row, writes the KV of a sequence; rows of an earlier, larger batch are taken for new."""
    for cache in (*runner.kv_cache.keys, *runner.kv_cache.values):
        cache.normal_()
    untouched = pool_of(runner).clone()
    capture = FakeCapture()
    graphs = make_graphs(runner, capture)
    assert torch.equal(pool_of(runner), untouched), "recording wrote to the cache"
    assert capture.num_rows == [6, 4, 2, 1]
    for lens in ([5, 9, 1, 4, 8], [3], [7, 2, 12], [1, 1]):
        batch = decode_batch(lens)
        before = pool_of(runner).clone()
        expected = runner.decoder.forward(batch, runner.kv_cache).clone()
        after = pool_of(runner).clone()
        for cache, old in zip((*runner.kv_cache.keys, *runner.kv_cache.values), before, strict=True):
            cache.copy_(old)
        assert graphs.fits(batch)
        logits = graphs.run(move_batch(batch, CPU))
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(pool_of(runner), after, rtol=1e-5, atol=1e-5)
        written = (pool_of(runner) != before).flatten(3).any(dim=3).any(dim=0).flatten()
        assert written.nonzero().flatten().tolist() == sorted(batch.slot_mapping.tolist())
    assert capture.replayed == [6, 1, 4, 2]


def test_all_sizes_leave_their_logits_in_one_place():
    """A gigabyte of logits, since a graph keeps what it returns."""
    places: dict[int, int] = {}

    def capture(compute: Callable[[], torch.Tensor]) -> Graph:
        output = compute()
        places[len(output)] = output.data_ptr()
        return Graph(lambda: None, output)

    forward: Any = lambda batch: torch.ones(len(batch.input_ids), 50)  # noqa: E731
    graphs = DecodeGraphs(forward, capture, max_num_seqs=40, max_num_blocks=2, device=CPU)
    assert sorted(places) == [1, 2, 4, 8, 16, 32, 40]
    assert len(set(places.values())) == 1
    assert graphs.run(decode_batch([3, 1, 2])).shape == (3, 50)


def test_what_is_no_decode_is_left_to_the_ordinary_way(runner: ModelRunner):
    """A prompt's chunk replayed as decode, or a batch beyond the largest size."""
    graphs = DecodeGraphs(lambda batch: batch.input_ids, FakeCapture(), max_num_seqs=3, max_num_blocks=2, device=CPU)
    assert graphs.fits(decode_batch([3, 1, 2]))
    assert not graphs.fits(decode_batch([3, 1, 2, 2]))
    assert not graphs.fits(largest_batch(EngineConfig().step_limits("cpu"), 100, 4, CPU))


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (40, [1, 2, 4, 8, 16, 32, 40]), (16, [1, 2, 4, 8, 16])],
)
def test_batch_sizes(max_num_seqs: int, sizes: list[int]):
    assert batch_sizes(max_num_seqs) == sizes


@pytest.mark.parametrize("max_model_len", [4, 100])
def test_the_largest_step(max_model_len: int):
    """A step that takes more memory than the one that was measured."""
    limits = StepLimits(max_num_seqs=7, max_num_batched_tokens=50)
    batch = largest_batch(limits, max_model_len, 4, CPU)
    lens = [min(length, max_model_len) for length in (8, 7, 7, 7, 7, 7, 7)]
    assert batch.seq_lens.tolist() == lens
    assert batch.positions.tolist() == [position for length in lens for position in range(length)]
    assert batch.logits_indices.tolist() == [sum(lens[: i + 1]) - 1 for i in range(7)]
    assert (batch.slot_mapping == -1).all()


@pytest.mark.parametrize("lens", [[3], [5, 9, 1], [7, 2, 12, 1, 4]])
def test_a_batch_is_moved_as_it_is_and_begins_where_kernels_want_it(lens: list[int]):
    """Parts that are cut off or mixed up in one copy; or compiled for anew because they begin anywhere."""
    batch = decode_batch(lens)
    moved = move_batch(batch, CPU)
    for name in (
        "input_ids",
        "positions",
        "slot_mapping",
        "logits_indices",
        "block_tables",
        "cu_seqlens_q",
        "seq_lens",
    ):
        before, after = getattr(batch, name), getattr(moved, name)
        assert torch.equal(before, after), name
        assert before.dtype == after.dtype
        assert after.is_contiguous()
        assert after.data_ptr() % 16 == 0, name
