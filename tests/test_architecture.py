"""Who may import whom, and how big things may get. The tables in architecture_rules are the law.

Checkers are pure functions over source text, so that each is shown to fail on a bad example as well as to pass here.
"""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from architecture_rules import ARROWS, COMPUTED_IMPORTS, LAZY_DOORS, THIRD_PARTY

REPO = Path(__file__).parents[1]
PACKAGES = {
    "langchain_pagedllm": REPO / "langchain_pagedllm",
    "pagedllm": REPO / "engine" / "pagedllm",
    "pagedllm_kernels": REPO / "kernels" / "pagedllm_kernels",
}

Where = Literal["module", "type checking", "function"]

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
SIZED_FOLDERS = ("langchain_pagedllm", "engine", "kernels", "tests", "integration_tests", "cookbook")
SIZED_SUFFIXES = (".py", ".cpp", ".h")


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported name, as a dotted path that may end in a class or function; ``"?"`` is computed at run time."""

    target: str
    line: int
    where: Where


# --- checkers -------------------------------------------------------------------------------------------------------


def read_imports(source: str, module: str, *, is_package: bool = False) -> list[Import]:
    """Every import of a file: statements and ``import_module`` calls, relative ones resolved."""
    package = module if is_package else module.rpartition(".")[0]
    return [
        Import(target=target, line=node.lineno, where=where)
        for node, where in _walk(ast.parse(source))
        for target in _targets(node, package)
    ]


def _walk(node: ast.AST, where: Where = "module") -> Iterator[tuple[ast.AST, Where]]:
    yield node, where
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        where = "function"
    elif isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING":
        where = "type checking"
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, where)


def _targets(node: ast.AST, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        origin = _resolve("." * node.level + (node.module or ""), package)
        return [f"{origin}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
        name = node.args[0] if node.args else None
        is_literal = isinstance(name, ast.Constant) and isinstance(name.value, str)
        return [_resolve(name.value, package) if is_literal else "?"]
    return []


def _resolve(name: str, package: str) -> str:
    level = len(name) - len(name.lstrip("."))
    if not level:
        return name
    base = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join([*base, name[level:]]).rstrip(".")


def arrow_violations(module: str, imports: list[Import], arrows: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Imports of this project outside functions that the table does not allow; a type may come from a lazy door."""
    room = room_of(module, arrows)
    if room is None:
        return [f"{module} has no room in the table"]
    allowed = (*arrows[room], room) if room != "pagedllm" else arrows[room]
    doors = LAZY_DOORS.get(room, ())
    return [
        f"{module}:{item.line} imports {item.target}"
        for item in imports
        if item.where != "function"
        and _is_ours(item.target)
        and not _is_under(item.target, (*allowed, *doors) if item.where == "type checking" else allowed)
    ]


def third_party_violations(module: str, imports: list[Import], table: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Imports of other distributions, wherever they stand, that the table does not allow."""
    allowed = table.get(room_of(module, table) or "", ())
    return [
        f"{module}:{item.line} imports {item.target}"
        for item in imports
        if not _is_ours(item.target)
        and item.target != "?"
        and item.target.split(".")[0] not in (*sys.stdlib_module_names, *allowed)
    ]


def door_violations(module: str, imports: list[Import], doors: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Imports inside functions that are no lazy door, and imports whose name is computed."""
    allowed = doors.get(room_of(module, doors) or "", ())
    return [
        f"{module}:{item.line} imports {item.target} inside a function"
        for item in imports
        if (item.target == "?" and module not in COMPUTED_IMPORTS)
        or (item.target != "?" and item.where == "function" and not _is_under(item.target, allowed))
    ]


def find_circle(imports: Mapping[str, list[Import]]) -> list[str]:
    """Modules that import each other in a ring when they are loaded; empty when there is none."""
    graph = {
        module: {_module_of(item.target, imports) for item in items if item.where == "module"} - {None, module}
        for module, items in imports.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def long_functions(source: str, limit: int = MAX_FUNCTION_LINES) -> list[str]:
    """Functions of more than ``limit`` lines, from ``def`` to the last line of the body."""
    return [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno - node.lineno >= limit
    ]


def room_of(module: str, table: Mapping[str, tuple[str, ...]]) -> str | None:
    """The longest entry that names the module or a package above it."""
    rooms = [room for room in table if room == module or (room != "pagedllm" and module.startswith(f"{room}."))]
    return max(rooms, key=len, default=None)


def _is_under(target: str, allowed: tuple[str, ...]) -> bool:
    return any(target == name or target.startswith(f"{name}.") for name in allowed)


def _is_ours(target: str) -> bool:
    return target.split(".")[0] in PACKAGES


def _module_of(target: str, modules: Mapping[str, object]) -> str | None:
    while target and target not in modules:
        target = target.rpartition(".")[0]
    return target or None


# --- this tree ------------------------------------------------------------------------------------------------------


def source_files() -> dict[str, Path]:
    """Module name -> file, for all three packages."""
    files = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


@pytest.fixture(scope="module")
def tree() -> dict[str, list[Import]]:
    return {
        module: read_imports(path.read_text(encoding="utf-8"), module, is_package=path.name == "__init__.py")
        for module, path in source_files().items()
    }


def test_tree_is_found(tree: dict[str, list[Import]]) -> None:
    """A moved folder would leave every other test here with nothing to check."""
    assert set(PACKAGES) < set(tree)
    assert "pagedllm.errors.PagedLLMError" in {item.target for item in tree["pagedllm.api"]}


def test_arrows_point_down(tree: dict[str, list[Import]]) -> None:
    """A room that reaches up or sideways cannot be understood or tested alone."""
    found = [text for module, items in tree.items() for text in arrow_violations(module, items, ARROWS)]
    assert not found, "\n".join(found)


def test_third_party_imports(tree: dict[str, list[Import]]) -> None:
    """Policy stays free of tensors, the adapters of torch, the contract of everything."""
    found = [text for module, items in tree.items() for text in third_party_violations(module, items, THIRD_PARTY)]
    assert not found, "\n".join(found)


def test_imports_inside_functions_are_lazy_doors(tree: dict[str, list[Import]]) -> None:
    """Any other one hides a circle or a missing dependency until the call."""
    found = [text for module, items in tree.items() for text in door_violations(module, items, LAZY_DOORS)]
    assert not found, "\n".join(found)


def test_no_circles(tree: dict[str, list[Import]]) -> None:
    """Works or fails by which module is imported first."""
    assert find_circle(tree) == []


def test_files_are_short() -> None:
    """A file that nobody reads whole."""
    files = [path for folder in SIZED_FOLDERS for path in (REPO / folder).rglob("*") if path.suffix in SIZED_SUFFIXES]
    lines = {str(path.relative_to(REPO)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {name: count for name, count in lines.items() if count > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    """A function that does more than its name says."""
    found = {module: long_functions(path.read_text(encoding="utf-8")) for module, path in source_files().items()}
    assert {module: names for module, names in found.items() if names} == {}


def test_import_leaves_torch_unloaded(record_property: Callable[[str, object], None]) -> None:
    """The adapters serve remote engines on machines without torch, and building a chain is quick."""
    script = """
        import sys, time
        start = time.perf_counter()
        import langchain_pagedllm
        from langchain_pagedllm import ChatPagedLLM, PagedLLM
        seconds = time.perf_counter() - start
        ChatPagedLLM(), PagedLLM()
        print(f"{'torch' in sys.modules} {seconds:.3f}")
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    has_torch, seconds = run.stdout.split()
    record_property("import_seconds", seconds)
    assert has_torch == "False"


# --- the checkers can fail ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "where"),
    [
        ("import pagedllm.core", "pagedllm.core", "module"),
        ("from pagedllm.core import EngineCore", "pagedllm.core.EngineCore", "module"),
        ("from ..core import EngineCore", "pagedllm.core.EngineCore", "module"),
        ("from .. import core", "pagedllm.core", "module"),
        ("from . import scheduler", "pagedllm.control.scheduler", "module"),
        ("from .scheduler import Scheduler", "pagedllm.control.scheduler.Scheduler", "module"),
        ("if TYPE_CHECKING:\n    import torch", "torch", "type checking"),
        ("importlib.import_module('torch')", "torch", "module"),
        ("import_module('..core', __package__)", "pagedllm.core", "module"),
        ("__import__(name)", "?", "module"),
        ("f = lambda: __import__('json')", "json", "function"),
    ],
)
def test_reads_import(source: str, target: str, where: Where) -> None:
    assert read_imports(source, "pagedllm.control.sequence") == [
        Import(target=target, line=source.count("\n") + 1, where=where)
    ]


def test_reads_relative_import_of_package() -> None:
    (item,) = read_imports("from .sequence import Sequence", "pagedllm.control", is_package=True)
    assert item.target == "pagedllm.control.sequence.Sequence"


@pytest.mark.parametrize(
    ("check", "table", "module", "source"),
    [
        (arrow_violations, ARROWS, "pagedllm.control.scheduler", "from ..compute import sampler"),
        (arrow_violations, ARROWS, "pagedllm.compute.sampler", "from ..control.scheduler import Scheduler"),
        (arrow_violations, ARROWS, "pagedllm.text.detokenizer", "from pagedllm.control.sequence import Sequence"),
        (arrow_violations, ARROWS, "pagedllm.api", "from .config import EngineConfig"),
        (arrow_violations, ARROWS, "pagedllm.api", "if TYPE_CHECKING:\n    from .local import LocalEngine"),
        (arrow_violations, ARROWS, "pagedllm_kernels.rope", "import pagedllm.errors"),
        (arrow_violations, ARROWS, "langchain_pagedllm.base", "from pagedllm.registry import shared_engine"),
        (arrow_violations, ARROWS, "pagedllm", "from pagedllm.local import LocalEngine"),
        (arrow_violations, ARROWS, "pagedllm.novelty", "import json"),
        (third_party_violations, THIRD_PARTY, "pagedllm.control.block_pool", "import numpy as np"),
        (third_party_violations, THIRD_PARTY, "pagedllm.text.tokenizer", "from torch import Tensor"),
        (third_party_violations, THIRD_PARTY, "pagedllm.errors", "import pydantic"),
        (third_party_violations, THIRD_PARTY, "pagedllm_kernels.rope", "import triton"),
        (third_party_violations, THIRD_PARTY, "langchain_pagedllm.base", "def f():\n    import torch"),
        (door_violations, LAZY_DOORS, "pagedllm.core", "def f():\n    from .local import LocalEngine"),
        (
            door_violations,
            LAZY_DOORS,
            "pagedllm.control.scheduler",
            "class A:\n    async def f(self):\n        import json",
        ),
        (door_violations, LAZY_DOORS, "pagedllm.registry", "load = lambda: __import__('pagedllm.core')"),
        (door_violations, LAZY_DOORS, "langchain_pagedllm.base", "import_module(name)"),
    ],
)
def test_checker_fails(
    check: Callable[..., list[str]], table: dict[str, tuple[str, ...]], module: str, source: str
) -> None:
    assert len(check(module, read_imports(source, module), table)) == 1


def test_circle_checker_fails() -> None:
    sources = {
        "pagedllm.a": "from .b import B",
        "pagedllm.b": "from pagedllm import c",
        "pagedllm.c": "from . import a",
    }
    imports = {module: read_imports(source, module) for module, source in sources.items()}
    assert set(find_circle(imports)) == set(sources)
    for harmless in ("def f():\n    from . import a", "if TYPE_CHECKING:\n    from . import a"):
        assert find_circle(imports | {"pagedllm.c": read_imports(harmless, "pagedllm.c")}) == []


def test_length_checker_fails() -> None:
    source = "def f():\n" + "    pass\n" * 59
    assert long_functions(source) == []
    assert long_functions(source + "    pass\n") == ["f: 61 lines"]
