"""The command line in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from pagedllm.cli.main import app


@pytest.fixture(autouse=True)
def _untouched_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command sets its process's log level; other tests must not see that."""
    for name in ("PAGEDLLM_MODEL", "PAGEDLLM_LOG_LEVEL", "PAGEDLLM_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    logger = logging.getLogger("pagedllm")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.fixture
def run_cli() -> Callable[..., Any]:
    """Run a command line: ``run_cli("models", "--json")`` gives exit_code, stdout and stderr."""
    return lambda *arguments, **options: CliRunner().invoke(app, [str(item) for item in arguments], **options)
