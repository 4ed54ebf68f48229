"""The package's logger, ``pagedllm``: silent unless the application or the user asks for it.

Importing the package adds a ``NullHandler``. Only if ``PAGEDLLM_LOG_LEVEL`` is set, the level of this one logger is set
too, and its records go to standard error as long as the application has no handler of its own that receives them. The
root logger is never touched. Records hold counts, names and paths, and no text of prompts or answers.
"""

from __future__ import annotations

import logging
import os
import sys

from .errors import ConfigError

__all__ = ["LEVEL_VARIABLE", "set_up_logger", "show_logs"]

LEVEL_VARIABLE = "PAGEDLLM_LOG_LEVEL"

_NAME = "pagedllm"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class _LastResort(logging.StreamHandler):  # type: ignore[type-arg]  # not subscriptable at run time in Python 3.10
    """Writes to standard error unless the root logger has handlers, which get the same records by propagation."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr  # whatever it is by now: notebooks and test runners replace it
            super().emit(record)


def set_up_logger() -> None:
    """Give the logger its NullHandler, and the level of ``PAGEDLLM_LOG_LEVEL`` if that is set."""
    logger = logging.getLogger(_NAME)
    logger.addHandler(logging.NullHandler())
    level = os.environ.get(LEVEL_VARIABLE)
    if not level:
        return
    try:
        show_logs(level)
    except ConfigError as error:
        # An import that fails for a misspelt variable would be out of proportion.
        show_logs("WARNING")
        logger.warning("%s; WARNING is used", error)


def show_logs(level: str) -> None:
    """Log from this level on, to standard error if nobody else receives it.

    Args:
        level: A name of Python's, in any case, such as ``"info"``.

    Raises:
        ConfigError: Not the name of a level.
    """
    if level.upper() not in _LEVELS:
        raise ConfigError.for_value(LEVEL_VARIABLE, level, f"must be one of {', '.join(_LEVELS)}")
    logger = logging.getLogger(_NAME)
    logger.setLevel(level.upper())
    if not any(isinstance(handler, _LastResort) for handler in logger.handlers):
        handler = _LastResort()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
