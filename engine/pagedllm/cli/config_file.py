"""``--config FILE.toml``: options of a command from a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["ConfigFile"]

_TABLES = ("engine", "server", "cluster")


def _apply(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the command's defaults: what the command line says comes first."""
    if path is None or context.resilient_parsing:
        return path
    known = {parameter.name for parameter in context.command.params} - {"config_file", "help"}
    try:
        context.default_map = {**(context.default_map or {}), **_read(path, known)}
    except ConfigError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    return path


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        callback=_apply,
        is_eager=True,
        metavar="FILE.toml",
        help="Options from a file, by their names with underscores, flat or in tables [engine], [server] and "
        "[cluster]; options on the command line come first.",
    ),
]


def _read(path: Path, known: set[str]) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    options: dict[str, Any] = {}
    for name, value in content.items():
        entries = value if name in _TABLES and isinstance(value, dict) else {name: value}
        for option, setting in entries.items():
            if option not in known:
                raise ConfigError(f"{path}: unknown option {option!r}; known: {', '.join(sorted(known))}")
            if option in options:
                raise ConfigError(f"{path}: {option} is given twice")
            # A table is what the command line takes as JSON.
            options[option] = json.dumps(setting) if isinstance(setting, (dict, list)) else setting
    return options
