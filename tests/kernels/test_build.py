"""Compiling at first use: every way in which it may go wrong ends in a reason, and never in a wait without end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedllm_kernels.cpu import build
from pagedllm_kernels.interface import KernelsUnavailableError
from pagedllm_kernels.registry import select_kernels

SHAPE = {"head_dim": 64, "hidden_size": 64, "intermediate_size": 64}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("PAGEDLLM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What was built, by a stand-in that takes no time; loading takes any file that says it is whole."""
    built: list[Path] = []

    def pretend(compiler: str, flags: tuple[str, ...], library: Path) -> None:
        built.append(library)
        library.write_text("whole")

    def load(path: str) -> None:
        if Path(path).read_text() != "whole":
            raise OSError("file too short")

    monkeypatch.setattr(build, "_build", pretend)
    monkeypatch.setattr(torch.ops, "load_library", load)
    return built


def test_what_was_built_is_found_again(cache: Path, builds: list[Path]):
    build.load_library("generic")
    build.load_library("generic")
    assert len(builds) == 1
    assert cache.stat().st_mode & 0o777 == 0o700


def test_each_instruction_set_has_a_library_of_its_own(cache: Path, builds: list[Path]):
    for isa in build.ISA_FLAGS:
        build.load_library(isa)
    assert len(set(builds)) == len(build.ISA_FLAGS)


def test_a_broken_library_is_built_anew(cache: Path, builds: list[Path]):
    build.load_library("generic")
    builds[0].write_text("cut o")
    build.load_library("generic")
    assert len(builds) == 2


def test_a_library_that_never_loads_is_an_error(cache: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch):
    def refuse(path: str) -> None:
        raise OSError("undefined symbol")

    monkeypatch.setattr(torch.ops, "load_library", refuse)
    with pytest.raises(KernelsUnavailableError, match="undefined symbol"):
        build.load_library("generic")


def test_two_at_once_build_once(cache: Path, builds: list[Path]):
    threads = [threading.Thread(target=build.load_library, args=("generic",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    assert len(builds) == 1


def test_a_killed_build_blocks_nobody(cache: Path, builds: list[Path]):
    """torch's own lock file would be waited for until the end of days."""
    code = (
        "import fcntl, os, pathlib, sys\n"
        "folder = pathlib.Path(os.environ['PAGEDLLM_CACHE_DIR'], 'kernels'); folder.mkdir(mode=0o700, parents=True)\n"
        "lock = open(folder / 'lock', 'w'); fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "(folder / 'tmpabc').mkdir(); (folder / 'tmpabc' / 'ops.o').write_text('half')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=30, check=False)
    assert (cache / "lock").exists()
    build.load_library("generic")
    assert len(builds) == 1


def test_a_cache_that_cannot_be_made_is_done_without(
    tmp_path: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PAGEDLLM_CACHE_DIR", str(tmp_path / "file"))
    build.load_library("generic")
    assert len(builds) == 1
    assert tmp_path not in builds[0].parents


def test_a_cache_that_others_may_write_is_not_trusted(cache: Path, builds: list[Path]):
    """What lies there is loaded as code."""
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    build.load_library("generic")
    assert builds[0].parent != cache


def test_no_compiler(monkeypatch: pytest.MonkeyPatch):
    """Asked for by name it is an error that says what to install; otherwise plain torch serves."""
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(KernelsUnavailableError, match=r"install g\+\+"):
        select_kernels("cpu", torch.float32, **SHAPE)
    assert select_kernels("auto", torch.float32, **SHAPE).name == "reference"


def test_a_compiler_that_fails_tells_why(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit 0\necho "no space left" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(KernelsUnavailableError, match="no space left"):
        build.load_library("generic")
    assert [item.name for item in cache.iterdir()] == ["lock"], "nothing half-built is left"


def test_the_instruction_set_can_be_chosen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PAGEDLLM_CPU_ISA", "generic")
    assert build.detect_isa() == "generic"
    monkeypatch.setenv("PAGEDLLM_CPU_ISA", "mmx")
    with pytest.raises(KernelsUnavailableError, match=r"PAGEDLLM_CPU_ISA='mmx'.*generic"):
        build.detect_isa()


def test_a_compiler_that_does_not_know_the_best_instruction_set_gets_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("PAGEDLLM_CPU_ISA", raising=False)
    monkeypatch.setattr(build, "_cpu_has", lambda isa: True)
    compiler = tmp_path / "c++"
    for unknown, best in (("amx", "avx512_bf16"), ("avx512", "avx2"), ("avx", "generic")):
        compiler.write_text(f'#!/bin/sh\ncase "$*" in *-m{unknown}*) exit 1;; esac\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        assert build.detect_isa() == best


def available() -> list[str]:
    return [isa for isa in build.ISA_FLAGS if build._cpu_has(isa)]


@pytest.mark.slow
@pytest.mark.parametrize("isa", available())
def test_every_instruction_set_passes_the_kernel_and_parity_tests(isa: str):
    environment: dict[str, Any] = {**os.environ, "PAGEDLLM_CPU_ISA": isa}
    tests = [
        "tests/kernels/test_cpu_kernels.py",
        "tests/kernels/test_stack.py",
        "tests/engine/test_parity.py",
        "tests/engine/test_family_parity.py",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *tests]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
