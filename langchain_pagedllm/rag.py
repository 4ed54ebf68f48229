"""RAG prompts of which as much as possible stays the same from question to question.

The prefix cache reuses a prompt from its beginning up to the first difference, in whole blocks. So what is the same for
all questions comes first, then the documents, and last what is new each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompt_values import ChatPromptValue
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda, RunnablePassthrough

from pagedllm.errors import ConfigError

from .chat_models import ChatPagedLLM
from .document_order import Arrangement, CacheAwareDocumentOrder
from .hints import read_ttl

__all__ = ["CacheAwareDocumentOrder", "PrefixStableRAGPrompt", "create_paged_rag_chain"]

_OPEN, _CLOSE = "<document>\n", "\n</document>\n"


class PrefixStableRAGPrompt(Runnable[Mapping[str, Any], ChatPromptValue]):
    """Makes a chat of instructions, documents and a question: a system's and a user's message.

    Each document stands in ``<document>`` tags on lines of their own, which begin and end tokens, so that its tokens
    are the same whatever stands before and after it. Documents are not numbered: a number would change with the order.
    A breakpoint of the cache follows the instructions and the last document.

    Args:
        instructions: The system's message, the same for all questions.
        volatile: Lines that change, such as the date, with the names of inputs in braces; they come after the
            documents and before the question.
        question: The question's line, likewise.
        format_document: A document's text; the default is its content. It must not depend on the others.
        ttl: How long the engine keeps what comes before a breakpoint: ``"5m"``, ``"1h"`` or seconds. None: without
            breakpoints, so as long as nobody needs the room.

    Raises:
        InvalidRequestError: A ttl that is none.
        ConfigError: ``question`` or ``volatile`` begins with white space, which would melt into the documents' end.
    """

    def __init__(
        self,
        instructions: str,
        *,
        volatile: str = "",
        question: str = "Question: {question}",
        format_document: Callable[[Document], str] | None = None,
        ttl: str | float | None = "5m",
    ) -> None:
        if ttl is not None:
            read_ttl({"type": "ephemeral", "ttl": ttl})
        for name, text in (("volatile", volatile), ("question", question)):
            if text[:1].isspace():
                raise ConfigError.for_value(name, text, "must not begin with white space")
        self.instructions = instructions
        self.volatile = volatile
        self.question = question
        self.format_document = format_document or _content
        self.ttl = ttl

    def format_messages(self, *, documents: Sequence[Document], **inputs: Any) -> list[BaseMessage]:
        """The chat for documents, in the order given, and the other inputs that the lines name.

        Raises:
            KeyError: An input that a line names is missing.
        """
        lines = [line.format(**inputs) for line in (self.volatile, self.question) if line]
        return [*self.prefix_messages(documents)[:-1], self._user_message(documents, "\n".join(lines))]

    def prefix_messages(self, documents: Sequence[Document]) -> list[BaseMessage]:
        """The same chat, ending with the last document; for ``warm_prefix`` and ``match_prefix``."""
        system = SystemMessage([self._part(self.instructions, is_end=True)])
        return [system, self._user_message(documents, "")]

    def invoke(self, input: Mapping[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> ChatPromptValue:
        """The chat for ``{"documents": [...], "question": ..., ...}``."""
        if kwargs:
            raise ConfigError(f"unknown option {min(kwargs)!r}: the prompt takes none per call")
        return self._call_with_config(
            lambda inputs: ChatPromptValue(messages=self.format_messages(**inputs)), input, config, run_type="prompt"
        )

    def _user_message(self, documents: Sequence[Document], rest: str) -> HumanMessage:
        last = len(documents) - 1
        parts = [
            self._part(f"{_OPEN}{self.format_document(document)}{_CLOSE}", is_end=index == last)
            for index, document in enumerate(documents)
        ]
        return HumanMessage([*parts, *([{"type": "text", "text": rest}] if rest else [])])

    def _part(self, text: str, *, is_end: bool) -> dict[str, Any]:
        part: dict[str, Any] = {"type": "text", "text": text}
        if is_end and self.ttl is not None:
            part["cache_control"] = {"type": "ephemeral", "ttl": self.ttl}
        return part


def create_paged_rag_chain(
    retriever: Runnable[str, list[Document]],
    model: ChatPagedLLM,
    prompt: PrefixStableRAGPrompt | str = "Answer the question from the documents.",
    *,
    order: Literal["off", "stable", "tree"] | CacheAwareDocumentOrder = "tree",
    output_parser: Runnable[Any, Any] | None = None,
    ask_engine: bool = True,
) -> Runnable[Any, dict[str, Any]]:
    """A chain from a question, or a dictionary with one and what else the prompt names, to an answer.

    The answer is a dictionary: the inputs, ``"documents"`` in the order of the prompt, ``"order"``, an
    ``Arrangement`` that tells what was done, and ``"answer"``. Streamed, its pieces come one after the other.

    Args:
        retriever: From a question to documents, best first.
        model: That answers.
        prompt: Or only its instructions.
        order: How to order the documents, by name or as an object of your own, which others may share.
        output_parser: Of the model's message; the default gives its text.
        ask_engine: Let the engine confirm that it still has what an order by tree counts on; costs two short calls,
            over the network for a model behind a URL. Without effect on an order of your own.
    """
    built = PrefixStableRAGPrompt(prompt) if isinstance(prompt, str) else prompt
    if isinstance(order, str):
        confirm = _Confirmation(model, built) if ask_engine and order == "tree" else None
        order = CacheAwareDocumentOrder(order, confirm=confirm)
    arrange = RunnableLambda(order.arrange, order.aarrange, name="arrange_documents")
    parser = StrOutputParser() if output_parser is None else output_parser
    return (
        RunnableLambda(_as_inputs)
        | RunnablePassthrough.assign(order=itemgetter("question") | retriever | arrange)
        | RunnablePassthrough.assign(documents=lambda inputs: _documents(inputs["order"]))
        | RunnablePassthrough.assign(answer=RunnableLambda(_prompt_inputs) | built | model | parser)
    )


class _Confirmation:
    """Asks the engine how many leading documents of a prompt it has cached."""

    def __init__(self, model: ChatPagedLLM, prompt: PrefixStableRAGPrompt) -> None:
        self._model = model
        self._prompt = prompt

    def __call__(self, documents: Sequence[Document]) -> int:
        model, prompt = self._model, self._prompt
        cached = model.match_prefix(prompt.prefix_messages(documents))
        # Of a document that is cached, the block in which it ends is not: it holds what came after. What the template
        # puts at the end of a prompt is not either.
        slack = 2 * model._get_engine().model_info().block_size
        for num_documents in range(len(documents), 0, -1):
            messages = prompt.prefix_messages(documents[:num_documents])
            if model.get_num_tokens_from_messages(messages) - slack <= cached:
                return num_documents
        return 0


def _content(document: Document) -> str:
    return document.page_content


def _as_inputs(value: Any) -> dict[str, Any]:
    return {"question": value} if isinstance(value, str) else dict(value)


def _documents(arrangement: Arrangement) -> list[Document]:
    return list(arrangement.documents)


def _prompt_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name != "order"}
