"""Figures for plots, apart from whatever else a process draws with matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["new_figure"]

_INCHES = (10.0, 4.8)
_DPI = 120


def new_figure() -> Figure:
    """An empty figure that belongs to no window and no global state.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        # Lazy door: large, and only for those who want a plot.
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise MissingDependencyError("a plot needs matplotlib: pip install 'langchain-pagedllm[bench]'") from error
    return Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
