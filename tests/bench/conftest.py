"""A tiny model with a long context, and commands that leave no trace in the logger."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from tiny_models import write_hf_llama


@pytest.fixture(autouse=True)
def _same_log_level() -> Iterator[None]:
    logger = logging.getLogger("pagedllm")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random three-layer Llama for up to 2,048 tokens."""
    folder = tmp_path_factory.mktemp("long")
    write_hf_llama(folder, max_position_embeddings=2048)
    return str(folder)
