"""LangChain models over a paged-attention engine.

Names are loaded at their first use, so that importing the package stays quick.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cancellation import CancelScope, cancel_scope
    from .chat_models import ChatPagedLLM
    from .llms import PagedLLM
    from .middleware import PagedLLMPromptCachingMiddleware
    from .rag import CacheAwareDocumentOrder, PrefixStableRAGPrompt, create_paged_rag_chain
    from .registration import register

    __version__: str

__all__ = [
    "CacheAwareDocumentOrder",
    "CancelScope",
    "ChatPagedLLM",
    "PagedLLM",
    "PagedLLMPromptCachingMiddleware",
    "PrefixStableRAGPrompt",
    "__version__",
    "cancel_scope",
    "create_paged_rag_chain",
    "register",
]

_MODULES = {
    "CacheAwareDocumentOrder": ".rag",
    "CancelScope": ".cancellation",
    "ChatPagedLLM": ".chat_models",
    "PagedLLM": ".llms",
    "PagedLLMPromptCachingMiddleware": ".middleware",
    "PrefixStableRAGPrompt": ".rag",
    "cancel_scope": ".cancellation",
    "create_paged_rag_chain": ".rag",
    "register": ".registration",
}


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
