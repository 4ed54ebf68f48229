"""Making ``"pagedllm:..."`` known to ``init_chat_model`` and ``create_agent``."""

from __future__ import annotations

from typing import Any

from .errors import ConfigError, MissingDependencyError

__all__ = ["register"]


def register() -> None:
    """Let ``init_chat_model("pagedllm:smollm2-135m")`` and ``create_agent("pagedllm:...")`` find ``ChatPagedLLM``.

    LangChain keeps the providers that it knows in a table of its own and looks nowhere else, so this writes into that
    table. Nothing else here touches LangChain. Calling it again changes nothing.

    Raises:
        MissingDependencyError: ``langchain`` is not installed; the adapters themselves need only langchain-core.
        ConfigError: This version of LangChain keeps its providers elsewhere.
    """
    try:
        # Lazy door: langchain is optional.
        import langchain.chat_models.base as table  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependencyError("register() needs langchain: pip install 'langchain-pagedllm[agents]'") from error
    providers = getattr(table, "_BUILTIN_PROVIDERS", None)
    if not isinstance(providers, dict):
        raise ConfigError("this version of langchain has no table of providers; give the model as ChatPagedLLM(...)")
    providers["pagedllm"] = ("langchain_pagedllm", "ChatPagedLLM", _create)


def _create(cls: Any, **arguments: Any) -> Any:
    return cls(**arguments)
