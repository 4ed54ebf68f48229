"""``pagedllm models``: which models are here."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..config import DEFAULT_MODEL
from ..errors import ModelNotFoundError, PagedLLMError
from ..files.description import describe_model
from ..files.locate import ModelFiles, locate_model
from .errors import clear_errors, one_line
from .options import MODEL_VARIABLE

__all__ = ["models"]


@dataclass(frozen=True)
class _Entry:
    """One model that is here; ``problem`` tells why it cannot be used."""

    name: str
    path: str
    size_bytes: int | None = None
    architecture: str | None = None
    max_model_len: int | None = None
    problem: str | None = None


@clear_errors
def models(
    names: Annotated[list[str] | None, typer.Argument(help="Names or paths; default: all that are known.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """List the models that are here, with size, architecture and context length. Reads metadata, no weights.

    Without names: the embedded model, the one of PAGEDLLM_MODEL, and what was downloaded from the hub. Nothing is
    downloaded here.
    """
    wanted = names or _known_names()
    entries = [_look(name) for name in wanted]
    if as_json:
        typer.echo(json.dumps([asdict(entry) for entry in entries], indent=2))
    else:
        _print_table(entries)
    if names and any(entry.problem is not None for entry in entries):
        raise typer.Exit(1)


def _known_names() -> list[str]:
    chosen = os.environ.get(MODEL_VARIABLE)
    return list(dict.fromkeys([DEFAULT_MODEL, *([chosen] if chosen else []), *_cached_names()]))


def _cached_names() -> list[str]:
    """``org/model`` or ``org/model@revision`` of each model in the hub's cache."""
    own = os.environ.get("PAGEDLLM_CACHE_DIR")
    if own:
        cache = Path(own).expanduser() / "hub"
    else:
        try:
            from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415  lazy door: only this needs it
        except ImportError:
            return []
        cache = Path(HF_HUB_CACHE)
    names = []
    # The layout of huggingface_hub: models--org--model/refs/revision.
    for refs in sorted(cache.glob("models--*--*/refs")):
        name = refs.parent.name.removeprefix("models--").replace("--", "/", 1)
        revisions = [ref.relative_to(refs).as_posix() for ref in sorted(refs.rglob("*")) if ref.is_file()]
        names += [name if revision == "main" else f"{name}@{revision}" for revision in revisions]
    return names


def _look(name: str) -> _Entry:
    try:
        files = locate_model(name, local_only=True)
    except ModelNotFoundError as error:
        return _Entry(name, "", problem=one_line(error))
    except PagedLLMError as error:
        return _Entry(name, name, problem=one_line(error))
    size = _size(files)
    try:
        description = describe_model(files)
    except PagedLLMError as error:
        return _Entry(name, str(files.path), size, problem=one_line(error))
    return _Entry(name, str(files.path), size, description.architecture, description.max_model_len)


def _size(files: ModelFiles) -> int:
    """Bytes of the weights."""
    weights = [files.path] if files.kind == "gguf" else files.path.glob("*.safetensors")
    return sum(path.stat().st_size for path in weights)


def _print_table(entries: list[_Entry]) -> None:
    for entry in entries:
        typer.echo(entry.name)
        if entry.architecture is not None:
            typer.echo(f"  architecture    {entry.architecture}")
            typer.echo(f"  context length  {entry.max_model_len} tokens")
        if entry.size_bytes is not None:
            typer.echo(f"  size            {entry.size_bytes / 2**20:.1f} MiB")
        if entry.path:
            typer.echo(f"  path            {entry.path}")
        if entry.problem is not None:
            typer.echo(f"  not usable      {entry.problem}")
