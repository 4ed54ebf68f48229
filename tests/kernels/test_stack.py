"""Layers in one go against the same layers operation by operation, for every mix of rows that a step may hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from pagedllm_kernels.cpu.kernels import CPUKernels
from pagedllm_kernels.interface import LayerStack, StackLayer, StackShape
from pagedllm_kernels.reference import ReferenceKernels
from pagedllm_kernels.rope import rope_table

HIDDEN, HEADS, KV_HEADS, DIM, MIDDLE, BLOCK = 96, 6, 2, 32, 160, 16
SHAPE = StackShape(num_heads=HEADS, intermediate_size=MIDDLE, eps=1e-5, scale=DIM**-0.5, soft_cap=None, gelu=False)
WIDTH = (HEADS + 2 * KV_HEADS) * DIM


def make_layers(kernels: Any, num_layers: int, *, has_bias: bool, dtype: torch.dtype, window: int | None) -> Any:
    generator = torch.Generator().manual_seed(1)

    def weight(*shape: int) -> torch.Tensor:
        # Rounded to bfloat16 first, so that every dtype has the same weights.
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).bfloat16().to(dtype)

    return [
        StackLayer(
            input_norm=torch.rand(HIDDEN, generator=generator) + 0.5,
            qkv=kernels.prepare_linear(weight(WIDTH, HIDDEN), weight(WIDTH) if has_bias else None),
            attention_output=kernels.prepare_linear(weight(HIDDEN, HEADS * DIM)),
            mlp_norm=torch.rand(HIDDEN, generator=generator) + 0.5,
            gate_up=kernels.prepare_linear(weight(2 * MIDDLE, HIDDEN)),
            down=kernels.prepare_linear(weight(HIDDEN, MIDDLE)),
            window=window if i % 2 else None,
        )
        for i in range(num_layers)
    ]


def make_inputs(lengths: list[tuple[int, int]], num_layers: int, dtype: torch.dtype) -> dict[str, Any]:
    """Sequences of (new tokens, all tokens) whose earlier KV is random, over shuffled blocks."""
    generator = torch.Generator().manual_seed(2)
    counts = [-(-total // BLOCK) for _, total in lengths]
    blocks = torch.randperm(sum(counts), generator=generator).tolist()
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    positions, slots = [], []
    for i, (new, total) in enumerate(lengths):
        table = [blocks.pop() for _ in range(counts[i])]
        tables[i, : counts[i]] = torch.tensor(table, dtype=torch.int32)
        positions += range(total - new, total)
        slots += [table[j // BLOCK] * BLOCK + j % BLOCK for j in range(total - new, total)]
    shape = (num_layers, 2, sum(counts), BLOCK, KV_HEADS, DIM)
    caches = torch.randn(shape, generator=generator).bfloat16().to(dtype)
    return {
        "hidden": torch.randn(len(positions), HIDDEN, generator=generator),
        "key_caches": [layer[0] for layer in caches],
        "value_caches": [layer[1] for layer in caches],
        "positions": torch.tensor(positions),
        "table": rope_table(torch.linspace(1, 0.01, DIM // 2), 1200),
        "slot_mapping": torch.tensor(slots),
        "block_tables": tables,
        "cu_seqlens_q": torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0).int(),
        "seq_lens": torch.tensor([total for _, total in lengths], dtype=torch.int32),
    }


def run_one_by_one(kernels: Any, layers: list[StackLayer], inputs: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    hidden = inputs["hidden"].clone()
    caches = zip(inputs["key_caches"], inputs["value_caches"], strict=True)
    tables = [inputs[name] for name in ("block_tables", "cu_seqlens_q", "seq_lens")]
    for layer, (keys, values) in zip(layers, caches, strict=True):
        qkv = layer.qkv(kernels.add_rms_norm(hidden, None, layer.input_norm, SHAPE.eps, dtype))
        kernels.rope_store(qkv, inputs["positions"], inputs["table"], keys, values, inputs["slot_mapping"])
        attended = kernels.paged_attention(qkv, keys, values, *tables, SHAPE.scale, window=layer.window)
        normed = kernels.add_rms_norm(hidden, layer.attention_output(attended), layer.mlp_norm, SHAPE.eps, dtype)
        hidden += layer.down(kernels.gated_activation(layer.gate_up(normed), gelu=SHAPE.gelu))
    return torch.cat([hidden.flatten(), *(cache.float().flatten() for cache in inputs["key_caches"])])


def make_stack(kernels: CPUKernels, layers: list[StackLayer]) -> LayerStack:
    stack = kernels.prepare_stack(layers, SHAPE)
    assert stack is not None
    return stack


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 1)],
        [(1, 700)],
        [(1, 40)] * 9,
        [(300, 300)],
        [(1, 1100), (70, 200), (1, 3), (4, 17), (16, 16), (250, 300)],
    ],
    ids=str,
)
def test_as_good_as_the_operations_one_by_one(
    lengths: list[tuple[int, int]], window: int | None, has_bias: bool, dtype: torch.dtype, kernels: CPUKernels
):
    """A barrier too few shows as rows that are wrong now and then, a wrong stride as rows that always are."""
    options: dict[str, Any] = {"has_bias": has_bias, "window": window}
    layers = make_layers(kernels, 3, dtype=dtype, **options)
    reference = ReferenceKernels()
    plain = make_layers(reference, 3, dtype=dtype, **options)
    theirs = run_one_by_one(reference, plain, make_inputs(lengths, 3, dtype), dtype)
    wide = make_layers(reference, 3, dtype=torch.float32, **options)
    exact = run_one_by_one(reference, wide, make_inputs(lengths, 3, torch.float32), torch.float32)
    # In float32 the two differ by the order of their sums.
    allowed = 1e-4 if dtype == torch.float32 else 2 * (theirs - exact).abs().max().item()
    stack = make_stack(kernels, layers)
    found = []
    for _ in range(5):
        inputs = make_inputs(lengths, 3, dtype)
        stack(**inputs)
        found.append(torch.cat([inputs["hidden"].flatten(), *(x.float().flatten() for x in inputs["key_caches"])]))
    assert (found[0] - exact).abs().max().item() <= allowed
    assert all(torch.equal(item, found[0]) for item in found[1:]), "the same every time, whoever took which item"


def test_what_is_out_of_bounds_is_refused(kernels: CPUKernels):
    stack = make_stack(kernels, make_layers(kernels, 1, dtype=torch.bfloat16, has_bias=False, window=None))
    for name, value in (("positions", 1200), ("positions", -1), ("slot_mapping", 16), ("slot_mapping", -1)):
        inputs = make_inputs([(1, 1)], 1, torch.bfloat16)
        with pytest.raises(RuntimeError):
            stack(**(inputs | {name: torch.tensor([value])}))


def test_it_tells_where_the_time_went(kernels: CPUKernels):
    stack = make_stack(kernels, make_layers(kernels, 2, dtype=torch.bfloat16, has_bias=False, window=None))
    before = stack.seconds
    stack(**make_inputs([(200, 200)], 2, torch.bfloat16))
    assert set(before.values()) == {0}
    assert all(seconds > 0 for seconds in stack.seconds.values())


def test_other_layers_are_left_to_the_operations(kernels: CPUKernels):
    """Gates and what they let through are taken panel by panel, and so must fill panels."""
    layers = make_layers(kernels, 1, dtype=torch.float32, has_bias=False, window=None)
    assert kernels.prepare_stack(layers, dataclasses.replace(SHAPE, intermediate_size=MIDDLE - 16)) is None
