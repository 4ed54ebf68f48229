"""Looking into the prefix cache, and filling it before anybody waits for an answer."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from langchain_core.language_models import LanguageModelInput

from pagedllm.api import EngineStats, GenerateRequest, HintOutcome, RequestOutput

from .base import PagedModel
from .errors import langchain_errors

__all__ = ["PrefixMethods", "WarmedPrefix"]


@dataclass(frozen=True, kw_only=True)
class WarmedPrefix:
    """What warming did.

    Args:
        prompt_tokens: Of the prefix as it was given.
        cached_tokens: Those that the cache had already.
        hints: What became of the wish to warm it, and of other wishes that came with it.
    """

    prompt_tokens: int
    cached_tokens: int
    hints: tuple[HintOutcome, ...]


class PrefixMethods(PagedModel):
    """What both models offer besides answers. A prefix is an input like that of ``invoke``, as are the options."""

    @abstractmethod
    def _prefix_request(self, prefix: LanguageModelInput) -> GenerateRequest:
        """What asks for this prefix, with nothing after it."""

    def warm_prefix(self, prefix: LanguageModelInput, **options: Any) -> WarmedPrefix:
        """Compute the KV of a prefix and cache it, without generating anything.

        The cache works in whole blocks: the last tokens of a prefix that fill none are computed again. With
        ``cache_control={"type": "ephemeral", "ttl": "1h"}`` it is also kept for so long.
        """
        with langchain_errors():
            call = self._for_call(None, options)
            return _to_warmed(call._get_engine().warm(call._prefix_request(prefix)))

    async def awarm_prefix(self, prefix: LanguageModelInput, **options: Any) -> WarmedPrefix:
        """As ``warm_prefix``."""
        with langchain_errors():
            call = self._for_call(None, options)
            engine = await call._aget_engine()
            return _to_warmed(await engine.awarm(call._prefix_request(prefix)))

    def match_prefix(self, prefix: LanguageModelInput, **options: Any) -> int:
        """How many tokens of a prefix are cached now. Changes nothing."""
        with langchain_errors():
            call = self._for_call(None, options)
            return call._get_engine().match_prefix(call._prefix_request(prefix))

    async def amatch_prefix(self, prefix: LanguageModelInput, **options: Any) -> int:
        """As ``match_prefix``."""
        with langchain_errors():
            call = self._for_call(None, options)
            engine = await call._aget_engine()
            return await engine.amatch_prefix(call._prefix_request(prefix))

    def cache_stats(self) -> EngineStats:
        """The engine's counters, among them ``prefix_queries`` and ``prefix_hits`` in tokens."""
        with langchain_errors():
            return self._get_engine().stats()

    async def acache_stats(self) -> EngineStats:
        """As ``cache_stats``."""
        with langchain_errors():
            return await (await self._aget_engine()).astats()


def _to_warmed(output: RequestOutput) -> WarmedPrefix:
    usage = output.usage
    return WarmedPrefix(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens, hints=output.hints)
