"""The command ``pagedllm``."""

from __future__ import annotations

import sys

__all__ = ["run"]


def run() -> None:
    """What the installed command calls."""
    try:
        from .main import app  # noqa: PLC0415  typer is in an extra, and its absence must be a clear error
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.exit("Error: the command line needs the package 'typer': pip install 'langchain-pagedllm[local]'")
    app(prog_name="pagedllm")
