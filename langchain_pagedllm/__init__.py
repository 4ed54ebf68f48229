"""LangChain models over a paged-attention engine.

Names are loaded at their first use, so that importing the package stays quick.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .chat_models import ChatPagedLLM
    from .llms import PagedLLM

    __version__: str

__all__ = ["ChatPagedLLM", "PagedLLM", "__version__"]

_MODULES = {"ChatPagedLLM": ".chat_models", "PagedLLM": ".llms"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = importlib.metadata.version("langchain-pagedllm")
    elif name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name], __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # The next look-up finds it without coming here.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
