"""An order of documents in which a prompt begins like earlier ones, so that the engine has its KV already."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from langchain_core.documents import BaseDocumentTransformer, Document
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import run_in_executor

from pagedllm.errors import ConfigError

from .document_tree import DocumentTree

__all__ = ["Arrangement", "CacheAwareDocumentOrder"]

_MODES = ("off", "stable", "tree")


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Documents in the order in which to put them into a prompt, and what was done to get it.

    Args:
        documents: All that were given, unchanged.
        ranks: For each of them, its place in the order that the retriever gave, from 0.
        mode: By which they were ordered.
        num_shared: How many at the beginning stand as in an earlier prompt.
        num_confirmed: How many of these the engine has cached now; None: it was not asked.
        seconds: What the ordering took, without asking the engine.
    """

    documents: tuple[Document, ...]
    ranks: tuple[int, ...]
    mode: str
    num_shared: int = 0
    num_confirmed: int | None = None
    seconds: float = 0.0

    @property
    def max_displacement(self) -> int:
        """The farthest that a document was moved, in places."""
        return max((abs(rank - place) for place, rank in enumerate(self.ranks)), default=0)


class CacheAwareDocumentOrder(BaseDocumentTransformer, Runnable[Sequence[Document], list[Document]]):
    """Orders retrieved documents for reuse of their KV. Drops none and changes none.

    The prefix cache reuses a prompt from its beginning up to the first difference. Retrievers order by score, so that
    the same documents come in ever new orders and share little. As a document transformer or a step of a chain this
    gives the documents alone; ``arrange`` also tells what was done.

    Args:
        mode: ``"off"``: as retrieved. ``"stable"``: by id, or by text where a document has none. ``"tree"``: first the
            documents with which earlier prompts began, the longest such beginning; then the rest, those used most
            often first, so that they are a beginning for others.
        max_displacement: How many places a document may be moved from where the retriever put it, among those that may
            be moved; None: any number.
        keep_at_edge: So many of the best documents stay out of this and come last, the best one right before the
            question: some models read the edges of a long prompt better than its middle.
        confirm: Told the documents that an earlier prompt began with, says how many of them, from the first, the engine
            has cached now. ``create_paged_rag_chain`` asks the engine.
        max_remembered: How many earlier orders the tree keeps.

    Raises:
        ConfigError: Naming the argument.
    """

    def __init__(
        self,
        mode: Literal["off", "stable", "tree"] = "tree",
        *,
        max_displacement: int | None = None,
        keep_at_edge: int = 0,
        confirm: Callable[[Sequence[Document]], int] | None = None,
        max_remembered: int = 1024,
    ) -> None:
        if mode not in _MODES:
            raise ConfigError.for_value("mode", mode, f"must be one of {', '.join(_MODES)}")
        limits = (("max_displacement", max_displacement, 0), ("keep_at_edge", keep_at_edge, 0))
        for name, value, least in (*limits, ("max_remembered", max_remembered, 1)):
            is_number = isinstance(value, int) and not isinstance(value, bool) and value >= least
            if not is_number and not (value is None and name == "max_displacement"):
                raise ConfigError.for_value(name, value, f"must be a whole number from {least}")
        self.mode = mode
        self.max_displacement = max_displacement
        self.keep_at_edge = keep_at_edge
        self._confirm = confirm
        self._tree = DocumentTree(max_remembered)
        self._lock = threading.Lock()

    def arrange(self, documents: Sequence[Document]) -> Arrangement:
        """Order documents, and remember the order as one that is served."""
        started = time.perf_counter()
        if self.mode == "off":
            ranks, num_shared, num_confirmed, waited_s = list(range(len(documents))), 0, None, 0.0
        elif self.mode == "stable":
            num_shared, num_confirmed, waited_s = 0, None, 0.0
            ranks = self._fill([], documents, lambda rank: (documents[rank].id or "", documents[rank].page_content))
        else:
            ranks, num_shared, num_confirmed, waited_s = self._arrange_by_tree(documents)
        return Arrangement(
            documents=tuple(documents[rank] for rank in ranks),
            ranks=tuple(ranks),
            mode=self.mode,
            num_shared=num_shared,
            num_confirmed=num_confirmed,
            seconds=time.perf_counter() - started - waited_s,
        )

    async def aarrange(self, documents: Sequence[Document]) -> Arrangement:
        """As ``arrange``; the engine is asked in a thread, since it may be behind a URL."""
        if self._confirm is None or self.mode != "tree":
            return self.arrange(documents)
        return await run_in_executor(None, self.arrange, documents)

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        """The documents in their new order."""
        _refuse(kwargs)
        return list(self.arrange(documents).documents)

    async def atransform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        """As ``transform_documents``."""
        _refuse(kwargs)
        return list((await self.aarrange(documents)).documents)

    def invoke(self, input: Sequence[Document], config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        """The documents in their new order."""
        _refuse(kwargs)
        return self._call_with_config(lambda documents: list(self.arrange(documents).documents), input, config)

    async def ainvoke(
        self, input: Sequence[Document], config: RunnableConfig | None = None, **kwargs: Any
    ) -> list[Document]:
        """As ``invoke``."""
        _refuse(kwargs)

        async def order(documents: Sequence[Document]) -> list[Document]:
            return list((await self.aarrange(documents)).documents)

        return await self._acall_with_config(order, input, config)

    def _arrange_by_tree(self, documents: Sequence[Document]) -> tuple[list[int], int, int | None, float]:
        keys = [_key(document) for document in documents]
        weights = [len(document.page_content) + 1 for document in documents]
        num_confirmed: int | None = None
        waited_s = 0.0
        # What the engine has lost is forgotten, and the next best beginning looked for; twice, as others lose it too.
        for _ in range(3):
            with self._lock:
                path = self._tree.walk(keys, weights, lambda place, ranks: self._candidates(place, ranks, len(keys)))
            if self._confirm is None or not path:
                break
            started = time.perf_counter()
            num_confirmed = self._confirm([documents[rank] for rank in path])
            waited_s += time.perf_counter() - started
            if num_confirmed >= len(path):
                break
            with self._lock:
                self._tree.prune([keys[rank] for rank in path[: num_confirmed + 1]])
        with self._lock:
            popularity = [self._tree.popularity(key) for key in keys]
            ranks = self._fill(path, documents, lambda rank: -popularity[rank])
            self._tree.add([keys[rank] for rank in ranks])
        return ranks, len(path), num_confirmed, waited_s

    def _fill(self, path: Sequence[int], documents: Sequence[Document], key: Callable[[int], Any]) -> list[int]:
        """The path, then the other documents by a key, each where it may stand."""
        ranks = list(path)
        while len(ranks) < len(documents):
            left = [rank for rank in range(len(documents)) if rank not in ranks]
            ranks.append(min(self._candidates(len(ranks), left, len(documents)), key=lambda rank: (key(rank), rank)))
        return ranks

    def _candidates(self, place: int, left: Sequence[int], num_documents: int) -> Sequence[int]:
        """Which of the documents left may stand at a place."""
        if not left:
            return []
        num_kept = min(self.keep_at_edge, num_documents)
        num_free = num_documents - num_kept
        if place >= num_free:
            return [num_documents - 1 - place]  # the best one last
        free = [rank for rank in left if rank >= num_kept]
        if self.max_displacement is None:
            return free
        # Places are counted among the documents that may move.
        due = [rank for rank in free if rank - num_kept + self.max_displacement <= place]
        return due or [rank for rank in free if rank - num_kept - self.max_displacement <= place]


def _key(document: Document) -> bytes:
    """Equal for documents of the same id and text, also in a later answer of the retriever."""
    text = f"{document.id or ''}\0{document.page_content}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _refuse(options: dict[str, Any]) -> None:
    if options:
        raise ConfigError(f"unknown option {min(options)!r}: the order takes none per call")
