"""The notebook: executed, without errors, and with nothing of the machine that executed it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "cookbook" / "tour.ipynb"


@pytest.fixture(scope="module")
def cells() -> list[dict[str, Any]]:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def test_every_cell_was_executed_in_order(cells: list[dict[str, Any]]) -> None:
    """Outputs of cells that were run twice, or not at all, are not what a reader will get."""
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    # All but the first, which only imports.
    assert all(cell["outputs"] for cell in code[1:])
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2


def test_nothing_of_a_machine_is_in_it() -> None:
    assert not re.search(r"/(home|root|tmp|work|Users)/", NOTEBOOK.read_text(encoding="utf-8"))


@pytest.mark.model
@pytest.mark.slow
def test_cells_run(cells: list[dict[str, Any]]) -> None:
    """A name that the package no longer has."""
    namespace: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile(source(cell), f"cell {number}", "exec"), namespace)
