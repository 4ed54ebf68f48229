"""Read a JSON file of a model folder, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import ModelFileError

__all__ = ["parse_json_object", "read_json_object"]

# config.json has kilobytes, an index of a large model a few megabytes; anything beyond is not what it claims to be.
_MAX_BYTES = 64 * 2**20


def read_json_object(path: Path, *, required: bool = True) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Args:
        path: The file.
        required: Whether a missing file is an error; if not, it reads as ``{}``.

    Raises:
        ModelFileError: Missing (if required), unreadable, too large, or not a JSON object.
    """
    if not required and not path.exists():
        return {}
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise ModelFileError(f"{path}: {size} bytes, at most {_MAX_BYTES} are read as JSON")
        raw = path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    return parse_json_object(raw, where=str(path))


def parse_json_object(raw: bytes, *, where: str) -> dict[str, Any]:
    """Parse one JSON object; ``where`` names its source in errors.

    Raises:
        ModelFileError: Not JSON, not UTF-8, nested too deeply, or not an object.
    """
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{where}: a JSON object is expected, found {type(value).__name__}")
    return value
