"""``pagedllm env``: what a bug report needs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from ..bench.machine import describe_machine, versions
from ..config import DEFAULT_MODEL
from ..errors import PagedLLMError
from ..files.locate import locate_model
from .errors import one_line
from .options import MODEL_VARIABLE

__all__ = ["env", "relevant_variables"]

_PREFIXES = ("PAGEDLLM_", "HF_", "TRANSFORMERS_", "OMP_", "GOMP_", "KMP_", "MKL_", "TORCH_", "TRITON_", "CUDA_")
_NAMES = ("ATEN_CPU_CAPABILITY", "CC", "CXX", "LD_PRELOAD", "MALLOC_CONF", "ONEDNN_MAX_CPU_ISA", "PYTHONMALLOC")
_SECRET = re.compile(r"(^|_)(API_?KEY|AUTH|CREDENTIALS?|KEY|PASS|PASSWORD|SECRET|TOKEN|TOKENS)(_|$)")
# Of a URL: user and password, and a query, which often holds a key.
_SECRET_IN_VALUE = re.compile(r"(?<=://)[^/@\s]*@|(?<=\?)\S+")


def env() -> None:
    """Show what a bug report needs: versions, machine, threads, memory, environment. Secrets are masked."""
    _section("versions", versions())
    machine = describe_machine()
    for name in ("memory_bytes", "available_memory_bytes", "cgroup_memory_bytes"):
        value = machine.pop(name)
        machine[name.removesuffix("_bytes")] = None if value is None else f"{value / 2**30:.1f} GiB"
    machine["cpu_flags"] = " ".join(machine["cpu_flags"])
    _section("machine", {name: value or "unknown or none" for name, value in machine.items()})
    _section("torch", dict(_describe_torch()))
    _section("environment", relevant_variables(os.environ))
    names = dict.fromkeys([os.environ.get(MODEL_VARIABLE) or DEFAULT_MODEL, DEFAULT_MODEL])
    _section("models", {name: _where(name) for name in names})


def relevant_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that change what the engine does; values that are or hold secrets are replaced by ``***``."""
    chosen = sorted(name for name in environ if name in _NAMES or name.startswith(_PREFIXES))
    return {
        name: "***" if _SECRET.search(name) else _SECRET_IN_VALUE.sub("***", _short_home(environ[name]))
        for name in chosen
    }


def _describe_torch() -> Iterator[tuple[str, Any]]:
    try:
        import torch  # noqa: PLC0415  takes a second, and that it fails is worth a report
    except Exception as error:
        yield "import", f"fails: {one_line(error)}"
        return
    yield "threads", torch.get_num_threads()
    yield "cpu_capability", torch.backends.cpu.get_cpu_capability()
    yield "onednn", torch.backends.mkldnn.is_available()
    yield "parallel_backend", "OpenMP" if torch.backends.openmp.is_available() else "native"


def _where(name: str) -> str:
    try:
        return _short_home(str(locate_model(name, local_only=True).path))
    except PagedLLMError as error:
        return one_line(error)


def _short_home(text: str) -> str:
    # A home folder names its user, which a public report need not.
    home = str(Path.home())
    return text if home == "/" else text.replace(f"{home}/", "~/")


def _section(title: str, entries: Mapping[str, Any]) -> None:
    typer.echo(f"{title}:")
    width = max((len(name) for name in entries), default=0)
    for name, value in entries.items():
        typer.echo(f"  {name.ljust(width)}  {value}")
    if not entries:
        typer.echo("  none")
