"""The door to llguidance, which only requests with a grammar need."""

from __future__ import annotations

from types import ModuleType

from ..errors import MissingDependencyError

__all__ = ["load_gbnf_reader", "load_llguidance"]


def load_llguidance() -> ModuleType:
    """The module ``llguidance``.

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        import llguidance  # noqa: PLC0415
    except ImportError as error:
        raise _missing() from error
    return llguidance


def load_gbnf_reader() -> ModuleType:
    """The module ``llguidance.gbnf_to_lark``; as ``load_llguidance``."""
    try:
        from llguidance import gbnf_to_lark  # noqa: PLC0415
    except ImportError as error:
        raise _missing() from error
    return gbnf_to_lark


def _missing() -> MissingDependencyError:
    return MissingDependencyError(
        "structured output and tools need llguidance: install 'langchain-pagedllm[local]' or llguidance itself"
    )
