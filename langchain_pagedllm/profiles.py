"""Constructor arguments from a TOML file with profiles."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagedllm.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["read_profile"]


def read_profile(path: Path, profile: str | None) -> dict[str, Any]:
    """The entries at the top of a file, with those of a profile on top of them.

    Args:
        profile: Its name; None: the one that the file's ``profile`` names, if it does.

    Raises:
        ConfigError: The file cannot be read, is not TOML, or has no such profile.
    """
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        # The parser's own message says where; it does not quote the line, which may hold a key.
        raise ConfigError(f"{path} is not TOML: {error}") from error
    profiles, default = entries.pop("profiles", {}), entries.pop("profile", None)
    if not isinstance(profiles, Mapping) or not all(isinstance(item, Mapping) for item in profiles.values()):
        raise ConfigError(f"{path}: profiles must be tables such as [profiles.prod]")
    name = default if profile is None else profile
    if name is None:
        return entries
    if name not in profiles:
        raise ConfigError.for_value("profile", name, f"{path} has {', '.join(profiles) or 'no profiles'}")
    return {**entries, **profiles[name]}
