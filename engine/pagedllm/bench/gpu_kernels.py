"""The Triton kernels on the device they are for: right by the 2x rule, and how near to what the device can do."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagedllm_kernels.cost import Cost, Device, attention_cost
from pagedllm_kernels.reference import ReferenceKernels
from pagedllm_kernels.rope import rope_table
from pagedllm_kernels.sampling import sample as reference_sample
from pagedllm_kernels.triton.kernels import TritonKernels
from pagedllm_kernels.triton.sampling import sample

__all__ = [
    "SHAPES",
    "SPEED_CASES",
    "check_kernels",
    "measure_attention",
    "measure_ceilings",
    "paged_case",
    "share_of_ceiling",
]

SHAPES = ((9, 3, 64, 16), (32, 8, 128, 16), (32, 32, 96, 32), (7, 1, 128, 64), (8, 4, 256, 128))
"""Query heads, KV heads, head_dim and block_size."""
_LENGTHS = ((1, 1), (1, 700), (33, 33), (70, 200), (2, 90), (4, 17), (1, 1100), (129, 129))
_OPTIONS: tuple[dict[str, Any], ...] = ({}, {"window": 50}, {"soft_cap": 2.0, "window": 300})
SPEED_CASES = {"decode 64 x 4096": [(1, 4096)] * 64, "prefill 8 x 4096": [(4096, 4096)] * 8}
"""New and all tokens of each sequence; 32 query heads over 8 KV heads of 128."""


def paged_case(
    lengths: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, ...]:
    """Arguments of ``paged_attention`` over shuffled blocks.

    Args:
        heads: Query heads, KV heads, head_dim and block_size.
    """
    num_heads, num_kv_heads, head_dim, block_size = heads
    generator = torch.Generator().manual_seed(0)
    counts = [-(-total // block_size) for _, total in lengths]
    order = torch.randperm(sum(counts), generator=generator, dtype=torch.int64).int()
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for i, part in enumerate(order.split(counts)):
        tables[i, : len(part)] = part
    bounds = torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0).int()
    random = torch.Generator(device).manual_seed(0)
    shape = (sum(counts), block_size, num_kv_heads, head_dim)
    caches = [torch.randn(shape, generator=random, device=device).to(dtype) for _ in range(2)]
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(int(bounds[-1]), width, generator=random, device=device).to(dtype)
    lens = torch.tensor([total for _, total in lengths], dtype=torch.int32)
    return (qkv, *caches, tables.to(device), bounds.to(device), lens.to(device))


def check_kernels(
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[tuple[int, int, int, int]] = SHAPES,
    lengths: Sequence[tuple[int, int]] = _LENGTHS,
    options: Sequence[dict[str, Any]] = _OPTIONS,
) -> dict[str, Any]:
    """Compare every kernel with torch on the CPU; ``"failed"`` lists what broke the 2x rule."""
    failed, num_checks = [], 0

    def judge(name: str, ours: Tensor, theirs: Tensor, exact: Tensor) -> None:
        nonlocal num_checks
        num_checks += 1
        error = (ours.float().cpu() - exact.float()).abs().max().item()
        allowed = 2 * (theirs.float() - exact.float()).abs().max().item() + 2e-5 * exact.float().abs().max().item()
        if not error <= allowed:  # NaN is not
            failed.append({"kernel": name, "error": error, "allowed": allowed})

    for dtype in dtypes:
        for heads in shapes:
            name = f"{str(dtype).removeprefix('torch.')}, heads {heads[0]}/{heads[1]}, dim {heads[2]}, block {heads[3]}"
            for chosen in options:
                _check_attention(f"attention {chosen}, {name}", judge, lengths, heads, dtype, device, chosen)
            _check_layer(name, judge, heads, dtype, device)
    num_checks += 1
    if not _samples_agree(device):
        failed.append({"kernel": "sample", "error": "other tokens than the reference"})
    return {"num_checks": num_checks, "failed": failed}


_Judge = Callable[[str, Tensor, Tensor, Tensor], None]


def _check_attention(
    name: str,
    judge: _Judge,
    lengths: Sequence[tuple[int, int]],
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    options: dict[str, Any],
) -> None:
    case, scale, reference = paged_case(lengths, heads=heads, dtype=dtype, device=device), 0.1, ReferenceKernels()
    host = tuple(item.cpu() for item in case)
    wide = (*(item.float() for item in host[:3]), *host[3:])
    attend: Callable[..., Tensor] = TritonKernels().paged_attention
    attend_plainly: Callable[..., Tensor] = reference.paged_attention
    ours = attend(*case, scale, **options)
    theirs, exact = (attend_plainly(*tensors, scale, **options) for tensors in (host, wide))
    judge(name, ours, theirs, exact)


def _check_layer(
    name: str, judge: _Judge, heads: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Norms, rotation with KV store, and gates."""
    num_heads, num_kv_heads, head_dim, block_size = heads
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(9, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator)
    weight, x = torch.rand(head_dim, generator=generator), torch.randn(9, qkv.shape[1], generator=generator)
    wide_weight = torch.rand(qkv.shape[1], generator=generator)
    table, positions = rope_table(torch.rand(head_dim // 2, generator=generator), 50), torch.arange(9) * 5
    slots = torch.randperm(2 * block_size if block_size > 4 else 16, generator=generator)[:9]
    results: dict[str, list[Tensor]] = {"add_rms_norm": [], "norm_heads and rope_store": [], "gated_activation": []}
    for kernels, work, place in (
        (TritonKernels(), dtype, device),
        (ReferenceKernels(), dtype, torch.device("cpu")),
        (ReferenceKernels(), torch.float32, torch.device("cpu")),
    ):
        # Inputs are rounded to the dtype first, for float32 too.
        rows, stream = qkv.to(dtype).to(place, work), x.clone().to(place)
        normed = kernels.add_rms_norm(stream, rows, wide_weight.to(place), 1e-5, work)
        results["add_rms_norm"].append(normed.cpu())
        gate_up = rows if rows.shape[1] % 2 == 0 else rows[:, :-1].contiguous()
        results["gated_activation"].append(kernels.gated_activation(gate_up, gelu=False).cpu())
        rotated = rows.clone()
        shape = (-(-16 // block_size) + 2, block_size, num_kv_heads, head_dim)
        caches = [torch.zeros(shape, dtype=work, device=place) for _ in range(2)]
        kernels.norm_heads(rotated, weight.to(place), weight.to(place), num_kv_heads, 1e-6)
        kernels.rope_store(rotated, positions.to(place), table.to(place), caches[0], caches[1], slots.to(place))
        results["norm_heads and rope_store"].append(torch.cat([item.flatten().cpu() for item in (rotated, *caches)]))
    for kernel, (ours, theirs, exact) in results.items():
        judge(f"{kernel}, {name}", ours, theirs, exact)


def _samples_agree(device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(2)
    rows = [(t, k, p, m) for t in (0.5, 1.0) for k in (1, 50, 5000) for p in (0.9, 1.0) for m in (0.0, 0.05)]
    temperatures, top_ps, min_ps = (torch.tensor([row[i] for row in rows]) for i in (0, 2, 3))
    logits = 3 * torch.randn(len(rows), 5000, generator=generator)
    keys = torch.randint(0, 2**32, (len(rows), 2), generator=generator)
    rest = (temperatures, torch.tensor([row[1] for row in rows]), top_ps, min_ps, keys)
    return torch.equal(sample(logits.to(device), *rest).cpu(), reference_sample(logits, *rest))


def measure_ceilings(device: torch.device) -> Device:
    """What the device reaches: copying 2 GiB, and a product of bfloat16 matrices of 8,192."""
    source = torch.empty(2**31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _seconds(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    gemm_s = _seconds(lambda: a @ b)
    return Device(name="measured", bytes_per_s=2 * 2**31 / copy_s, flops_per_s=2 * 8192**3 / gemm_s)


def measure_attention(device: torch.device, ceilings: Device) -> dict[str, Any]:
    """Both attention kernels at their large sizes, and torch's attention over KV that lies side by side."""
    results = {}
    attend: Callable[..., Tensor] = TritonKernels().paged_attention
    for name, lengths in SPEED_CASES.items():
        case = paged_case(lengths, heads=(32, 8, 128, 16), dtype=torch.bfloat16, device=device)
        cost = attention_cost(lengths, num_heads=32, num_kv_heads=8, head_dim=128, itemsize=2)
        ours = _seconds(partial(attend, *case, 128**-0.5))
        results[name] = share_of_ceiling(cost, ours, ceilings) | {"sdpa_s": _seconds(_gathered_sdpa(case, lengths))}
    return results


def share_of_ceiling(cost: Cost, seconds: float, ceilings: Device) -> dict[str, Any]:
    """Rates that were achieved, and the share of the floor that the device's own ceilings set."""
    return {
        "seconds": seconds,
        "gb_per_s": cost.num_bytes / seconds / 1e9,
        "tflop_per_s": cost.num_flops / seconds / 1e12,
        "bound": cost.bound(ceilings),
        "share": cost.floor_s(ceilings) / seconds,
    }


def _gathered_sdpa(case: tuple[Tensor, ...], lengths: Sequence[tuple[int, int]]) -> Callable[[], Tensor]:
    """torch's attention for sequences of equal lengths, without the time that gathering would take."""
    qkv, key_cache, value_cache, tables, *_ = case
    (new, total), head_dim = lengths[0], key_cache.shape[3]
    keys, values = (
        cache[tables.long()].flatten(1, 2)[:, :total].transpose(1, 2).contiguous() for cache in (key_cache, value_cache)
    )
    query = qkv.view(len(lengths), new, -1, head_dim)[:, :, : -2 * key_cache.shape[2]].transpose(1, 2).contiguous()
    return lambda: scaled_dot_product_attention(query, keys, values, is_causal=new == total, enable_gqa=True)


def _seconds(run: Callable[[], object], *, num_runs: int = 20) -> float:
    """Median time on the device, after three runs that do not count."""
    for _ in range(3):
        run()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num_runs)]
    for before, after in marks:
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in marks) / 1e3
