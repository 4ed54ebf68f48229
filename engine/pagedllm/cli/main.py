"""The command ``pagedllm``: its subcommands, one file each, and what they share."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Annotated

import typer

from ..logs import LEVEL_VARIABLE, show_logs
from .bench import app as bench_app
from .chat import chat
from .env import env
from .errors import clear_errors
from .models import models
from .plan import plan
from .serve import serve

__all__ = ["app"]

app = typer.Typer(
    help="A paged-attention engine for language models.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    # Plain help shows long option names in full; a plain traceback, of a fault of ours, can be pasted into a report.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(chat)
app.command()(serve)
app.command()(models)
app.command()(plan)
app.command()(env)
app.add_typer(bench_app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pagedllm {importlib.metadata.version('langchain-pagedllm')}")
        raise typer.Exit


@app.callback()
@clear_errors
def _every_command(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    # A program of ours is the application, so its warnings are shown without being asked for.
    show_logs(os.environ.get(LEVEL_VARIABLE) or "WARNING")
