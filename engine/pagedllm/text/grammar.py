"""Grammars that answers are held to, by llguidance: compiled once, then followed token by token."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidRequestError, MissingDependencyError
from .guidance import load_llguidance
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

__all__ = ["Grammar", "GrammarCompiler", "GrammarError", "Matcher", "fill_bitmask", "new_executor"]

DEADLINE_S = 5.0
"""Seconds for which a request waits for its grammar. Most take a millisecond."""
_MAX_CACHED = 128
_MAX_COMPILING = 4
# Of the parser for one token, about 20,000 in a millisecond: the engine's thread waits for it.
_MAX_ITEMS_PER_STEP = 20_000

_Result = TypeVar("_Result")


class GrammarError(Exception):
    """A matcher has given up: its grammar asks for more work at one place than a step may take."""


class Matcher:
    """Follows one text. Not for several threads at once.

    Args:
        inner: Owned from now on.
        num_words: Words of 32 bits that a mask takes.
    """

    def __init__(self, inner: llguidance.LLMatcher, num_words: int) -> None:
        self.inner = inner
        self.num_words = num_words

    def accept(self, token_id: int) -> None:
        """Take the next token of the text.

        Raises:
            GrammarError: The grammar does not allow it, or is too hard to follow.
        """
        if not self.inner.consume_token(token_id):
            self.check()

    def allows(self, token_id: int) -> bool:
        """Whether the token may come next. False of a matcher that has given up."""
        return self.inner.validate_tokens([token_id]) == 1

    def check(self) -> None:
        """Raise GrammarError if it has given up."""
        if self.inner.is_error():
            raise GrammarError(_reason(self.inner.get_error()))

    @property
    def may_end(self) -> bool:
        """Whether the text is complete, though more may come."""
        return self.inner.is_accepting()

    @property
    def is_complete(self) -> bool:
        """Whether the text is complete and nothing may follow but its end."""
        return self.inner.is_stopped() and not self.inner.is_error()


class Grammar:
    """A compiled grammar. Safe from many threads at once."""

    def __init__(self, inner: llguidance.LLMatcher, num_words: int) -> None:
        self._inner = inner
        self._num_words = num_words
        self._lock = threading.Lock()

    def new_matcher(self) -> Matcher:
        """A matcher at the beginning of a text."""
        with self._lock:
            return Matcher(self._inner.deep_copy(), self._num_words)


class GrammarCompiler:
    """Compiles grammars in threads of their own and keeps the latest. Safe from many threads at once.

    Nobody waits longer than the deadline. A thread that is late goes on until llguidance's own limits end it; more
    than four at a time are not begun.

    Args:
        tokenizer: The model's.
        vocab_size: Columns of the model's logits; may be more than the tokenizer has.
        deadline_s: For one grammar, and for the tables that the first one makes of the vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, *, deadline_s: float = DEADLINE_S) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._deadline_s = deadline_s
        self._slots = threading.BoundedSemaphore(_MAX_COMPILING)
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, Grammar] = OrderedDict()
        self._tables: llguidance.LLTokenizer | None = None
        self._building = threading.Lock()

    def find(self, text: str) -> Grammar | None:
        """The compiled grammar, if it is at hand."""
        with self._lock:
            if text in self._cache:
                self._cache.move_to_end(text)
            return self._cache.get(text)

    def compile(self, text: str, *, param: str) -> Grammar:
        """Compile a grammar, or find it among the latest.

        Args:
            text: In Lark's notation, or llguidance's JSON.
            param: What to call it in errors.

        Raises:
            InvalidRequestError: It is wrong, too large, or not compiled in time.
        """
        grammar = self.find(text)
        if grammar is None:
            grammar = self._with_deadline(lambda: self._compile(text, param), param)
            with self._lock:
                self._cache[text] = grammar
                while len(self._cache) > _MAX_CACHED:
                    self._cache.popitem(last=False)
        return grammar

    def _compile(self, text: str, param: str) -> Grammar:
        guidance = load_llguidance()
        limits = guidance.LLParserLimits(verbose_errors=False, step_max_items=_MAX_ITEMS_PER_STEP)
        inner = guidance.LLMatcher(self._get_tables(), text, log_level=0, limits=limits)
        if not inner.is_error():
            # A first mask builds much of what later ones share, and finds grammars that are too hard from the start.
            inner.compute_bitmask()
        if inner.is_error():
            raise InvalidRequestError(f"{param}: {_reason(inner.get_error())}", param=param)
        return Grammar(inner, num_words=(self._vocab_size + 31) // 32)

    def _get_tables(self) -> llguidance.LLTokenizer:
        """llguidance's view of the vocabulary, built when first needed: it takes half a second."""
        with self._building:
            if self._tables is None:
                self._tables = load_llguidance().LLTokenizer(
                    self._tokenizer.to_json(),
                    n_vocab=self._vocab_size,
                    eos_token=sorted(self._tokenizer.eos_token_ids),
                )
            return self._tables

    def _with_deadline(self, function: Callable[[], _Result], param: str) -> _Result:
        results: list[_Result] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(function())
            except BaseException as error:  # a panic of llguidance is no Exception
                errors.append(error)
            finally:
                self._slots.release()

        if self._slots.acquire(timeout=self._deadline_s):
            thread = threading.Thread(target=work, name="pagedllm-grammar", daemon=True)
            thread.start()
            thread.join(self._deadline_s)
        if errors:
            if isinstance(errors[0], (InvalidRequestError, MissingDependencyError)):
                raise errors[0]
            reason = f"{param}: this model's tokenizer cannot be held to a grammar: {errors[0]}"
            raise InvalidRequestError(reason, param=param) from errors[0]
        if not results:
            raise InvalidRequestError(
                f"{param}: not compiled within {self._deadline_s:g} s; make it simpler", param=param
            )
        return results[0]


def new_executor() -> llguidance.LLExecutor:
    """What ``fill_bitmask`` computes with; in the calling thread, because a mask takes microseconds."""
    return load_llguidance().LLExecutor(num_threads=1)


def fill_bitmask(matchers: Sequence[Matcher], executor: llguidance.LLExecutor) -> NDArray[np.int32]:
    """The tokens that may come next, for a batch in one call.

    Args:
        matchers: Of one model, one for each row. One that gives up has a row without meaning: see ``Matcher.check``.

    Returns:
        [len(matchers), num_words] int32; token ``i`` is allowed if bit ``i % 32`` of word ``i // 32`` is set.
    """
    num_words = matchers[0].num_words
    bitmask = np.zeros((len(matchers), num_words), dtype=np.int32)
    rows = [(matcher.inner, row) for row, matcher in enumerate(matchers)]
    executor.unsafe_compute_mask_ptr(rows, bitmask.ctypes.data, num_words * 4, len(matchers))
    return bitmask


def _reason(text: str) -> str:
    """What matters of an error of several lines, which may quote the whole grammar."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["unknown error"]
    details = [line for line in lines[1:] if line.startswith("error: ")]
    return " ".join([lines[0], *details])[:300]
