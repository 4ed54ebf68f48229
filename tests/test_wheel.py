"""What users install is the wheel, not this tree: build it, list it, import from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
# Import package -> the folder that holds it.
SOURCE_ROOTS = {"langchain_pagedllm": ".", "pagedllm": "engine", "pagedllm_kernels": "kernels"}
METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # From a copy, because setuptools leaves build/ and egg-info beside what it builds, and reads old ones again.
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, source)
    for name in ("langchain_pagedllm", "engine", "kernels", "tests", "cookbook"):
        shutil.copytree(REPO / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(source)]
    run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = target.glob("*.whl")
    return path


def test_wheel_holds_the_three_packages_and_nothing_else(wheel: Path) -> None:
    """A room that setuptools overlooks, a lost py.typed or C++ source, tests and cookbook installed for everybody."""
    expected = set()
    for package, root in SOURCE_ROOTS.items():
        for path in (REPO / root / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                expected.add(path.relative_to(REPO / root).as_posix())
    assert {f"{package}/py.typed" for package in SOURCE_ROOTS} < expected

    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert len(names) == len(set(names))
    dist_info = wheel.name.split("-py3")[0] + ".dist-info/"
    assert {name.removeprefix(dist_info) for name in names if name.startswith(dist_info)} == METADATA
    assert {name for name in names if not name.startswith(dist_info)} == expected


def test_wheel_imports_without_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    """A module that is found only because the tree is on the path."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    script = """
        import sys
        sys.path[:0], sys.path[len(sys.path):] = sys.argv[1:2], sys.argv[2:]
        import langchain_pagedllm, pagedllm, pagedllm_kernels, pagedllm.local
        from langchain_pagedllm import ChatPagedLLM, PagedLLM
        for name, module in sorted(sys.modules.items()):
            if name.split(".")[0] in ("langchain_pagedllm", "pagedllm", "pagedllm_kernels"):
                print(module.__file__)
    """
    # -I ignores the environment and the working folder, -S the .pth files of an editable install; the dependencies'
    # folders are then added by hand, after the wheel.
    dependencies = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    command = [sys.executable, "-I", "-S", "-c", textwrap.dedent(script), str(tmp_path), *dependencies]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    files = run.stdout.splitlines()
    assert len(files) > 10
    assert [file for file in files if not file.startswith(str(tmp_path) + os.sep)] == []
