"""Compile the C++ kernels once and keep them.

The library lies in a cache folder under a name that holds everything it depends on: sources, torch, compiler, flags.
It is built in a temporary folder and renamed into place, under a file lock that the system drops with its holder; so
an interrupted build leaves nothing that a later one would wait for or load.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from ..interface import KernelsUnavailableError

__all__ = ["ISA_FLAGS", "detect_isa", "load_library"]

logger = logging.getLogger("pagedllm.kernels")

_SOURCES = Path(__file__).parent
_COMPILE_TIMEOUT_S = 300
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512cd")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16")
ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16"),
    "avx512_bf16": _AVX512_BF16,
    "avx512": _AVX512,
    "avx2": _AVX2,
    "generic": (),
}
"""Compiler flags of each instruction set that the kernels know, best first. ``generic`` suits every CPU."""


def detect_isa() -> str:
    """The best instruction set of this CPU that the compiler knows; ``PAGEDLLM_CPU_ISA`` chooses a lesser one.

    Raises:
        KernelsUnavailableError: The variable names none, or one that this CPU lacks; or there is no compiler.
    """
    available = [isa for isa in ISA_FLAGS if _cpu_has(isa)]
    wanted = os.environ.get("PAGEDLLM_CPU_ISA")
    if not wanted:
        compiler = _find_compiler()
        return next((isa for isa in available if _compiler_knows(compiler, isa)), "generic")
    if wanted not in available:
        raise KernelsUnavailableError(f"PAGEDLLM_CPU_ISA={wanted!r}: this CPU has {', '.join(available)}")
    return wanted


def load_library(isa: str) -> None:
    """Make ``torch.ops.pagedllm_cpu`` available, compiling it if the cache does not have it.

    Raises:
        KernelsUnavailableError: No compiler, or it fails, or the result cannot be loaded.
    """
    compiler = _find_compiler()
    flags = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast", *ISA_FLAGS[isa])
    name = f"pagedllm_cpu-{_key(compiler, flags)}.so"
    with _cache_folder() as folder:
        library = folder / name
        for attempt in ("cached", "rebuilt"):
            if not library.exists():
                _build_locked(compiler, flags, library)
            try:
                torch.ops.load_library(str(library))
                return
            except OSError as error:
                # Cut off by a full disk, say. What was built a moment ago and still does not load never will.
                if attempt == "rebuilt":
                    raise KernelsUnavailableError(f"{library} cannot be loaded: {error}") from error
                library.unlink(missing_ok=True)


def _cpu_has(isa: str) -> bool:
    if isa == "generic":
        return True
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    line = next((line for line in cpuinfo.splitlines() if line.startswith("flags")), "")
    # cpuinfo writes avx512_bf16 and amx_tile where the compiler writes avx512bf16 and amx-tile.
    present = {flag.replace("_", "") for flag in line.split()}
    return all(flag.removeprefix("-m").replace("-", "") in present for flag in ISA_FLAGS[isa])


def _find_compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    raise KernelsUnavailableError("no C++ compiler: install g++ (Debian: apt install g++) for the fast CPU kernels")


def _compiler_knows(compiler: str, isa: str) -> bool:
    """Whether it is young enough for the flags: AMX came with GCC 11 and Clang 11, AVX-512 BF16 with 10 and 9."""
    command = [compiler, *ISA_FLAGS[isa], "-x", "c++", "-fsyntax-only", os.devnull]
    return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    digest = hashlib.sha256()
    for part in (torch.__version__, version, *flags):
        digest.update(part.encode() + b"\0")
    for source in sorted(_SOURCES.glob("*.[ch]*")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


@contextlib.contextmanager
def _cache_folder() -> Iterator[Path]:
    """A folder that only we can write: what lies there is loaded as code. Temporary where the cache is read-only."""
    base = os.environ.get("PAGEDLLM_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "pagedllm")
    folder = Path(base).expanduser() / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        is_private = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if is_private and os.access(folder, os.W_OK):
            yield folder
            return
        logger.warning("%s is not ours alone to write: the CPU kernels are compiled for this process only", folder)
    except OSError as error:
        logger.warning("%s: the CPU kernels are compiled for this process only", error)
    with tempfile.TemporaryDirectory(prefix="pagedllm-") as temporary:
        yield Path(temporary)  # the system keeps a loaded library after its file is gone


def _build_locked(compiler: str, flags: tuple[str, ...], library: Path) -> None:
    with open(library.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():  # someone else may have built it while we waited
            _build(compiler, flags, library)


def _build(compiler: str, flags: tuple[str, ...], library: Path) -> None:
    logger.warning("compiling the CPU kernels, once for this machine; takes about ten seconds")
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder, library.name)
        object_file = Path(folder, "ops.o")
        includes = [f"-I{path}" for path in include_paths()]
        links = [f"-L{path}" for path in library_paths()]
        _run([compiler, *flags, *includes, "-c", str(_SOURCES / "ops.cpp"), "-o", str(object_file)])
        # Without -fopenmp: the thread pool is to be the one that torch has loaded, not a second one beside it.
        _run([compiler, "-shared", str(object_file), *links, "-ltorch_cpu", "-lc10", "-o", str(built)])
        os.replace(built, library)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailableError(f"compiling the CPU kernels failed: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.splitlines()
        errors = [line for line in lines if "error" in line] or lines  # warnings of torch's headers come before them
        raise KernelsUnavailableError("compiling the CPU kernels failed: " + "\n".join(errors)[:2000])
