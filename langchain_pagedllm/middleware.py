"""Cache hints for agents. Needs ``langchain``, which the extra ``agents`` brings."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from langchain.agents.middleware.types import AgentMiddleware, ModelRequest, ModelResponse
from langgraph.config import get_config

from pagedllm.errors import ConfigError

from .chat_models import ChatPagedLLM
from .hints import read_ttl

__all__ = ["PagedLLMPromptCachingMiddleware"]

_BEHAVIORS = ("ignore", "warn", "raise")


class PagedLLMPromptCachingMiddleware(AgentMiddleware[Any, Any, Any]):
    """Keeps the KV of an agent's conversation from turn to turn, so that each turn computes its new tokens only.

    The prefix cache finds a conversation's earlier turns without it, too, as long as nobody else needed the room; this
    keeps them for ``ttl``, and names the conversation, so that a router can send it to the replica that has them.
    It sets the model's call options alone: no message, checkpoint or tool is changed.

    Args:
        type: ``"ephemeral"``, the only kind.
        ttl: ``"5m"``, ``"1h"`` or seconds, counted anew from each turn.
        min_messages_to_cache: Conversations with fewer messages, the system's included, are left alone.
        unsupported_model_behavior: What to do about other models than ``ChatPagedLLM``.
        session_from: ``"thread_id"``: take the conversation's name from the graph's configuration. Its hash is sent.

    Raises:
        InvalidRequestError: Another type, or a ttl that is none.
        ConfigError: Another behaviour, session or number.
    """

    def __init__(
        self,
        type: Literal["ephemeral"] = "ephemeral",
        ttl: str | float = "5m",
        min_messages_to_cache: int = 0,
        unsupported_model_behavior: Literal["ignore", "warn", "raise"] = "warn",
        session_from: Literal["thread_id"] | None = "thread_id",
    ) -> None:
        super().__init__()
        read_ttl({"type": type, "ttl": ttl})
        if unsupported_model_behavior not in _BEHAVIORS:
            allowed = f"must be one of {', '.join(_BEHAVIORS)}"
            raise ConfigError.for_value("unsupported_model_behavior", unsupported_model_behavior, allowed)
        if session_from not in ("thread_id", None):
            raise ConfigError.for_value("session_from", session_from, "must be 'thread_id' or None")
        if isinstance(min_messages_to_cache, bool) or not isinstance(min_messages_to_cache, int):
            raise ConfigError.for_value("min_messages_to_cache", min_messages_to_cache, "must be a whole number")
        self.type, self.ttl = type, ttl
        self.min_messages_to_cache = min_messages_to_cache
        self.unsupported_model_behavior = unsupported_model_behavior
        self.session_from = session_from

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Add the hints to a model's call."""
        return handler(self._with_hints(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """As ``wrap_model_call``."""
        return await handler(self._with_hints(request))

    def _with_hints(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        if not isinstance(request.model, ChatPagedLLM):
            self._report_other(request.model)
            return request
        num_messages = len(request.messages) + (request.system_message is not None)
        if num_messages < self.min_messages_to_cache:
            return request
        hints: dict[str, Any] = {"cache_control": {"type": self.type, "ttl": self.ttl}}
        if (session := self._session()) is not None:
            hints["prompt_cache_key"] = session
        # What the caller of the agent set wins.
        return request.override(model_settings={**hints, **request.model_settings})

    def _session(self) -> str | None:
        if self.session_from is None:
            return None
        try:
            thread_id = get_config().get("configurable", {}).get(self.session_from)
        except RuntimeError:  # outside of a graph
            return None
        # A thread's id may be a person's; the engine needs only to tell threads apart.
        return None if thread_id is None else hashlib.sha256(str(thread_id).encode()).hexdigest()

    def _report_other(self, model: Any) -> None:
        text = f"PagedLLMPromptCachingMiddleware does nothing for {type(model).__name__}: only for ChatPagedLLM"
        if self.unsupported_model_behavior == "raise":
            raise ConfigError(text)
        if self.unsupported_model_behavior == "warn":
            warnings.warn(text, stacklevel=4)
