"""``pagedllm plan``: what a model takes of a memory, and how many sequences fit."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import DEFAULT_GPU_MEMORY_UTILIZATION, DEFAULT_MODEL, EngineConfig
from ..errors import ConfigError, ModelNotFoundError
from ..files.hub import fetch_config, parse_reference
from ..files.locate import locate_model
from .errors import clear_errors
from .options import MODEL_VARIABLE, describe_engine_options

if TYPE_CHECKING:
    from ..compute.models.config import ModelConfig
    from ..compute.planning import MemoryPlan

__all__ = ["plan"]

_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]i?B|B)?", re.IGNORECASE)
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for ending, base in (("b", 1000), ("ib", 1024))
}
_HELP = describe_engine_options()


@clear_errors
def plan(
    model: Annotated[
        str | None,
        typer.Option(
            help="A model, as for the engine. Of one on the hub that is not here, only config.json is downloaded.",
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Instead: the config.json of a model.")] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            help="Of the GPU to plan for, such as 80GiB, 24GB or bytes. Without it: a CPU engine on this machine."
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(help=f"Share of it that the engine may take; default {DEFAULT_GPU_MEMORY_UTILIZATION}."),
    ] = None,
    dtype: Annotated[str, typer.Option(help=_HELP["dtype"] + " On a GPU auto is bfloat16.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help=_HELP["max_model_len"])] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help=_HELP["max_num_seqs"])] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help=_HELP["max_num_batched_tokens"])] = None,
    block_size: Annotated[int | None, typer.Option(help=_HELP["block_size"])] = None,
    kv_cache_memory_bytes: Annotated[
        str | None, typer.Option(help=_HELP["kv_cache_memory_bytes"] + " Also as 2GiB. Not with --gpu-memory.")
    ] = None,
    seq_len: Annotated[
        list[int] | None, typer.Option(help="Tokens of a sequence that should fit max-num-seqs times. May be repeated.")
    ] = None,
    json_file: Annotated[
        typer.FileTextWrite | None, typer.Option("--json", lazy=False, help="Write the plan to this file.")
    ] = None,
) -> None:
    """Plan the memory of an engine: weights, activations, KV blocks, and how many sequences fit. Reads no weights.

    Ends with exit code 1 if an engine could not start like this, and says what to change.
    """
    memory_bytes = _read_size("gpu_memory", gpu_memory)
    given: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "block_size": block_size,
        "kv_cache_memory_bytes": _read_size("kv_cache_memory_bytes", kv_cache_memory_bytes),
    }
    engine = EngineConfig(**{name: value for name, value in given.items() if value is not None})
    made = _make_plan(_read_model(model, config), engine, memory_bytes, gpu_memory_utilization, seq_len or [])
    for line in _table(made):
        typer.echo(line)
    if json_file is not None:
        json.dump(asdict(made), json_file, indent=2)
        json_file.write("\n")
    if made.problems:
        raise typer.Exit(1)


def _make_plan(
    model: ModelConfig, engine: EngineConfig, gpu_memory: int | None, utilization: float | None, lengths: list[int]
) -> MemoryPlan:
    # Lazy doors, here and below: torch, which --help need not wait for.
    import torch  # noqa: PLC0415

    from ..compute.model_runner import resolve_dtype  # noqa: PLC0415
    from ..compute.planning import GPUMemory, plan_memory  # noqa: PLC0415

    if gpu_memory is None:
        if utilization is not None:
            raise ConfigError.for_value("gpu_memory_utilization", utilization, "goes with gpu_memory")
        return plan_memory(model, engine, resolve_dtype(engine.dtype), lengths=lengths)
    if engine.kv_cache_memory_bytes is not None:
        raise ConfigError.for_value(
            "kv_cache_memory_bytes", engine.kv_cache_memory_bytes, "does not go with gpu_memory, which sizes the pool"
        )
    share = DEFAULT_GPU_MEMORY_UTILIZATION if utilization is None else utilization
    if not 0 < share <= 1:
        raise ConfigError.for_value("gpu_memory_utilization", share, "must be in (0, 1]")
    dtype = torch.bfloat16 if engine.dtype == "auto" else resolve_dtype(engine.dtype)
    gpu = GPUMemory(memory_bytes=gpu_memory, utilization=share)
    return plan_memory(model, engine, dtype, gpu=gpu, lengths=lengths)


def _read_model(model: str | None, config: Path | None) -> ModelConfig:
    from ..compute.models.config import load_config_file, load_model_config  # noqa: PLC0415

    if config is not None:
        if model is not None:
            raise ConfigError.for_value("config", str(config), "does not go with model: it stands for one")
        return load_config_file(config)
    name = model or os.environ.get(MODEL_VARIABLE) or DEFAULT_MODEL
    try:
        return load_model_config(locate_model(name, local_only=True))
    except ModelNotFoundError:
        reference = parse_reference(name)
        if reference is None or Path(name).exists():
            raise
        if reference.tag is not None:
            raise ModelNotFoundError(
                f"no model {name!r} here, and a GGUF file has no config.json that could be downloaded alone: plan "
                "with the model that it was made of; GGUF weights are expanded to dtype"
            ) from None
        with tempfile.TemporaryDirectory() as folder:
            return load_config_file(fetch_config(reference, Path(folder)))


def _read_size(option: str, text: str | None) -> int | None:
    """Bytes, of a text such as ``80GiB``."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None or (size := int(float(match[1]) * _UNITS[(match[2] or "").lower()])) < 1:
        raise ConfigError.for_value(
            option, text, "must be a positive size: bytes, or a number with KiB, MiB, GiB, TiB, kB, MB, GB or TB"
        )
    return size


def _table(plan: MemoryPlan) -> Iterator[str]:
    yield f"{plan.architecture} in {plan.dtype}, {plan.num_parameters:,} parameters"
    yield ""
    rows: list[tuple[str, str]] = []
    if plan.memory_bytes is not None and plan.usable_bytes is not None:
        rows += [
            ("GPU memory", _show(plan.memory_bytes)),
            ("usable", _show(plan.usable_bytes)),
        ]
    rows += [
        ("weights", _show(plan.weights_bytes)),
        (
            "activations",
            f"{_show(plan.activation_bytes)}  at most, estimated for {plan.max_num_batched_tokens} tokens a step",
        ),
        ("KV pool", _show(plan.pool_bytes)),
        ("KV of a token", f"{plan.kv_bytes_per_token:,} bytes"),
        ("KV of a block", f"{plan.block_bytes:,} bytes, {plan.block_size} tokens"),
        ("blocks", f"{plan.num_blocks:,}, {plan.num_blocks * plan.block_size:,} tokens"),
    ]
    yield from (f"{name:<16}{value}" for name, value in rows)
    yield ""
    yield f"sequences at a time       paged  unused  with {plan.max_model_len} reserved  unused"
    width = len(f"with {plan.max_model_len} reserved")
    for item in plan.sequences:
        yield (
            f"{item.num_tokens:>9,} tokens each {item.num_paged:>8,} {item.unused_share_paged:>7.1%}  "
            f"{item.num_reserved:>{width},} {item.unused_share_reserved:>7.1%}"
        )
    if plan.problems or plan.advice:
        yield ""
    yield from (f"Does not fit: {problem}" for problem in plan.problems)
    yield from (f"Note: {advice}" for advice in plan.advice)


def _show(num_bytes: int) -> str:
    if abs(num_bytes) >= 2**30:
        return f"{num_bytes / 2**30:,.2f} GiB"
    return f"{num_bytes / 2**20:,.1f} MiB"
