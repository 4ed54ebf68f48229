"""A paged-attention engine for language models, in this process.

Importing it sets up its logger and does nothing else; ``unload`` and ``set_max_engines`` are loaded at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .logs import set_up_logger

if TYPE_CHECKING:
    from .registry import set_max_engines, unload

__all__ = ["set_max_engines", "unload"]

set_up_logger()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Here rather than above, because every import of a part of the package runs this file.
    from . import registry  # noqa: PLC0415

    value = globals()[name] = getattr(registry, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
