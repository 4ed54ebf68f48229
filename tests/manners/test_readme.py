"""The README's tables name every option with its default, and no other."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from langchain_core.language_models import BaseChatModel, BaseLLM

from langchain_pagedllm import ChatPagedLLM, PagedLLM
from pagedllm.config import EngineConfig

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def rows(heading: str) -> dict[str, str]:
    """Option -> default, of the table below a heading."""
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            names, default, *_ = line.strip("|").split("|")
            found.update(dict.fromkeys(re.findall(r"`(\w+)`", names), default.strip()))
    return found


def test_engine_options() -> None:
    table = rows("Options of the engine")
    fields = {field.name: field.default for field in dataclasses.fields(EngineConfig) if field.name != "model"}
    assert set(table) == set(fields)
    for name, default in fields.items():
        if isinstance(default, bool):
            assert table[name] == f"`{default}`"
        elif isinstance(default, (int, str)):
            assert table[name].strip('`"') == str(default)


def test_model_options() -> None:
    own = {*ChatPagedLLM.model_fields, *PagedLLM.model_fields}
    inherited = {*BaseChatModel.model_fields, *BaseLLM.model_fields}
    documented = set(rows("Options of the models"))
    # Named in the sentence below the table.
    assert {name if name != "model_name" else "model" for name in own - inherited} == documented | {
        "api_key",
        "max_retries",
    }


def test_environment_variables() -> None:
    """A variable that the code reads and nobody can find, or one that is promised and not read."""
    root = Path(__file__).parents[2]
    folders = [root / name for name in ("langchain_pagedllm", "engine", "kernels")]
    sources = [path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py")]
    read = set(re.findall(r'"(PAGEDLLM_[A-Z_]*[A-Z])"', "\n".join(sources)))
    assert set(rows("Environment")) == {*read, "HF_HOME", "HF_TOKEN", "HF_HUB_OFFLINE", "HF_ENDPOINT"}
