"""Models from the Hugging Face hub, or from its cache on this machine.

Of a repository only what a model needs is fetched: configuration, tokenizer, chat template, and safetensors weights
or one GGUF file. Never pickle, never code. huggingface_hub does the transfers and keeps the cache, so its environment
variables (``HF_HOME``, ``HF_TOKEN``, ``HF_HUB_OFFLINE``, ``HF_ENDPOINT``) mean what they mean elsewhere; with
``PAGEDLLM_CACHE_DIR`` the cache is in that folder. It continues a transfer that is cut, and keeps the files of an
interrupted download that are complete.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import MissingDependencyError, ModelLoadError, ModelNotFoundError, UnsupportedModelError
from .safetensors_metadata import INDEX_NAME, SINGLE_NAME, read_weight_map

__all__ = ["HubReference", "fetch", "fetch_config", "find_cached", "parse_reference"]

logger = logging.getLogger(__name__)

_NAME = r"[A-Za-z0-9][\w.-]*"
_REFERENCE = re.compile(rf"({_NAME}/{_NAME})(?:@([^:@\s]+))?(?::([^:@\s]+))?")
# A path in a repository that may be a chunk of a GGUF model, or the eyes of a multimodal one.
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_NOT_A_MODEL = re.compile(r"(^|/)mmproj")
_DEFAULT_TAG = "Q4_K_M"
_PICKLES = (".bin", ".pt", ".pth")
_SMALL_FILES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
    }
)


@dataclass(frozen=True)
class HubReference:
    """A model on the hub.

    Args:
        repo_id: ``org/model``.
        revision: Branch, tag or commit.
        tag: Which GGUF file of several: a quantisation such as ``Q4_K_M`` in any case, or a file's name; None: the
            safetensors weights, else the only GGUF file, else the one of ``Q4_K_M``, as in llama.cpp.
    """

    repo_id: str
    revision: str = "main"
    tag: str | None = None

    def __str__(self) -> str:
        return self.repo_id + (f"@{self.revision}" if self.revision != "main" else "")


def parse_reference(name: str) -> HubReference | None:
    """Understand ``org/model[@revision][:tag]``; None for what cannot be the name of a repository."""
    match = _REFERENCE.fullmatch(name)
    if match is None or ".." in match[1] or match[1].lower().endswith((".gguf", ".safetensors")):
        return None
    return HubReference(match[1], match[2] or "main", match[3])


def find_cached(reference: HubReference) -> Path:
    """The model in the cache: its folder or its GGUF file. Nothing is downloaded, no connection made.

    Raises:
        ModelNotFoundError: It is not there.
        MissingDependencyError: huggingface_hub is not installed.
    """
    _, cache = _hub_and_cache()
    folder = _cached_snapshot(reference, cache)
    if folder is None:
        raise ModelNotFoundError(f"no model {reference}: it is not in the cache {cache}; load it once to download it")
    return _chosen_path(folder, _choose(reference, _names_in(folder)))


def fetch(reference: HubReference) -> Path:
    """Download what is missing of a model and return its folder or its GGUF file.

    Blocks for as long as it takes; a progress bar shows on a terminal. Without a connection the cache serves.

    Raises:
        ModelNotFoundError: No such repository, revision or file, no access to it, or neither connection nor cache.
        UnsupportedModelError: Only weights that we do not read.
        ModelLoadError: The disk has too little space, or the transfer failed.
        MissingDependencyError: huggingface_hub is not installed.
    """
    hub, cache = _hub_and_cache()
    if hub.constants.HF_HUB_OFFLINE:
        return _from_cache(reference, cache, "HF_HUB_OFFLINE forbids to look on the hub")
    try:
        info = hub.HfApi().model_info(reference.repo_id, revision=reference.revision, files_metadata=True)
    except Exception as error:  # httpx's and huggingface_hub's many kinds
        refusal = _refusal(hub.errors, reference, error)
        if refusal is not None:
            raise refusal from error
        reason = f"{hub.constants.ENDPOINT} cannot be asked: {_first_line(error)}"
        return _from_cache(reference, cache, reason, cause=error)
    sizes = {item.rfilename: item.size or 0 for item in info.siblings or ()}
    options = {"revision": reference.revision, "cache_dir": cache}
    try:
        names = _choose(reference, sizes)
        if INDEX_NAME in names:
            index = hub.hf_hub_download(reference.repo_id, INDEX_NAME, **options)
            names |= set(read_weight_map(Path(index).parent).values())
        _check_space(reference, {name: sizes.get(name, 0) for name in names}, cache, info.sha)
        patterns = [_escape(name) for name in sorted(names)]
        folder = hub.snapshot_download(reference.repo_id, allow_patterns=patterns, **options)
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(
            f"{reference}: the download from {hub.constants.ENDPOINT} failed: {_first_line(error)}. What is complete "
            f"is kept in {cache}; try again to go on"
        ) from error
    return _chosen_path(Path(folder), names)


def fetch_config(reference: HubReference, folder: Path) -> Path:
    """Download a model's config.json alone, to a folder of the caller's, and return its path.

    Raises:
        ModelNotFoundError: No such repository, revision or file, or no access to it.
        ModelLoadError: It cannot be downloaded now.
        MissingDependencyError: huggingface_hub is not installed.
    """
    hub, _ = _hub_and_cache()
    try:
        path = hub.hf_hub_download(
            reference.repo_id, "config.json", revision=reference.revision, local_dir=folder, cache_dir=folder
        )
    except Exception as error:  # as in fetch()
        refusal = _refusal(hub.errors, reference, error)
        if refusal is not None:
            raise refusal from error
        missing, offline = hub.errors.EntryNotFoundError, hub.errors.LocalEntryNotFoundError
        if isinstance(error, missing) and not isinstance(error, offline):
            raise ModelNotFoundError(f"no model {reference}: the repository has no config.json") from error
        raise ModelLoadError(
            f"{reference}: config.json cannot be downloaded from {hub.constants.ENDPOINT}: {_first_line(error)}"
        ) from error
    return Path(path)


def _hub_and_cache() -> tuple[Any, Path]:
    """The huggingface_hub package, and the folder of its cache that is in force."""
    try:
        # Lazy door: only models from the hub need it.
        import huggingface_hub  # noqa: PLC0415
        import huggingface_hub.constants  # noqa: PLC0415
        import huggingface_hub.errors  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependencyError(
            "models from the hub need the package huggingface_hub: pip install 'langchain-pagedllm[local]'"
        ) from error
    own = os.environ.get("PAGEDLLM_CACHE_DIR")
    cache = Path(own).expanduser() / "hub" if own else Path(huggingface_hub.constants.HF_HUB_CACHE)
    return huggingface_hub, cache


def _from_cache(reference: HubReference, cache: Path, reason: str, *, cause: Exception | None = None) -> Path:
    try:
        path = find_cached(reference)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"no model {reference}: {reason}, and the cache {cache} does not have it. Connect (a mirror can be set "
            "with HF_ENDPOINT), or give the path of a local copy"
        ) from (cause or error)
    logger.log(logging.INFO if cause is None else logging.WARNING, "%s: %s; using the cached copy", reference, reason)
    return path


def _cached_snapshot(reference: HubReference, cache: Path) -> Path | None:
    """Where the cache keeps a revision: ``refs`` tells the commit of a branch or tag, ``snapshots`` has its files."""
    folder = cache / f"models--{reference.repo_id.replace('/', '--')}"
    try:
        commit = (folder / "refs" / reference.revision).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        commit = reference.revision
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() and snapshot.parent == folder / "snapshots" else None


def _names_in(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _choose(reference: HubReference, names: Iterable[str]) -> set[str]:
    """The files of a repository that make the model; of weights with an index only the index."""
    available = set(names)
    ggufs = sorted(name for name in available if name.lower().endswith(".gguf") and not _NOT_A_MODEL.search(name))
    weights = sorted(name for name in available if name.endswith(".safetensors") and "/" not in name)
    if reference.tag is not None:
        return {_choose_gguf(reference, ggufs, reference.tag)}
    if "config.json" in available and weights:
        main = {INDEX_NAME} & available or {SINGLE_NAME} & available or set(weights)
        return (available & _SMALL_FILES) | main
    if ggufs:
        return {ggufs[0] if len(ggufs) == 1 else _choose_gguf(reference, ggufs, _DEFAULT_TAG)}
    if any(name.endswith(_PICKLES) for name in available):
        raise UnsupportedModelError(
            f"{reference}: weights only as pickle, which can run code when loaded; look for a repository with "
            "safetensors or GGUF files"
        )
    raise ModelNotFoundError(
        f"{reference}: no model: config.json with safetensors weights, or a .gguf file, is expected; "
        f"the repository has {', '.join(sorted(available)[:10]) or 'no files'}"
    )


def _choose_gguf(reference: HubReference, ggufs: list[str], tag: str) -> str:
    if tag.lower().endswith(".gguf"):
        found = [name for name in ggufs if name == tag]
    else:
        pattern = re.compile(rf"(?:^|[-./]){re.escape(tag)}[-.]", re.IGNORECASE)
        found = [name for name in ggufs if pattern.search(name)]
    if any(_SPLIT.search(name) for name in found):
        raise UnsupportedModelError(f"{reference}: {found[0]} is one part of a split GGUF file, which is not supported")
    if len(found) != 1:
        problem = "several GGUF files match" if found else "no GGUF file matches"
        shown = ", ".join(found or ggufs) or "none"
        raise ModelNotFoundError(
            f"{reference}: {problem} {tag!r}; name one as {reference}:<quantisation or file>, of: {shown}"
        )
    return found[0]


def _check_space(reference: HubReference, sizes: Mapping[str, int], cache: Path, commit: str | None) -> None:
    """Refuse a download that the disk has no room for; huggingface_hub only warns, and fails when it is full."""
    cached = _cached_snapshot(HubReference(reference.repo_id, commit or reference.revision), cache)
    needed = sum(size for name, size in sizes.items() if cached is None or not (cached / name).exists())
    existing = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ModelLoadError(
            f"{reference}: the download takes {needed} bytes, but the disk of {cache} has {free} bytes free; free "
            f"{needed - free} bytes, or set HF_HOME or PAGEDLLM_CACHE_DIR to a folder on another disk"
        )


def _refusal(errors: Any, reference: HubReference, error: Exception) -> ModelNotFoundError | None:
    """What the hub says against a request, in our words; None for troubles that are not about this model."""
    if isinstance(error, errors.GatedRepoError):
        return ModelNotFoundError(
            f"no access to {reference.repo_id}: it is gated. Accept its terms on its page on the hub, then set "
            "HF_TOKEN to a token of that account"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFoundError(f"no model {reference}: {reference.repo_id} has no revision {reference.revision!r}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFoundError(
            f"no model {reference}: the hub has no repository {reference.repo_id!r}, or it is private. Check the "
            "spelling; for a private one set HF_TOKEN"
        )
    return None


def _chosen_path(folder: Path, names: set[str]) -> Path:
    gguf = next((name for name in names if name.lower().endswith(".gguf")), None)
    return folder if gguf is None else folder / gguf


def _escape(name: str) -> str:
    """A name as the pattern that matches it alone."""
    return re.sub(r"([*?[])", r"[\1]", name)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
