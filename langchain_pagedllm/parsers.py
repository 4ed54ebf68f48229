"""LangChain's output parsers, except that an answer that was cut is an error.

LangChain's own close brackets and quotes that are missing at the end, so that a half answer looks like a whole one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGeneration, Generation

__all__ = ["WholeCalls", "WholeJson", "WholePydantic", "WholePydanticCalls"]


class WholeJson(JsonOutputParser):
    """JSON text; of a stream, what there is so far, and an error where it ends too early."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _check_text(result, partial)
        return super().parse_result(result, partial=partial)


class WholePydantic(PydanticOutputParser[Any]):
    """JSON text as an instance of a pydantic class."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _check_text(result, partial)
        return super().parse_result(result, partial=partial)


class WholeCalls(JsonOutputKeyToolsParser):
    """The arguments of a tool's call."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _check_end(result)
        return super().parse_result(result, partial=partial)


class WholePydanticCalls(PydanticToolsParser):
    """The arguments of a tool's call as an instance of a pydantic class."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _check_end(result)
        return super().parse_result(result, partial=partial)


def _check_text(result: Sequence[Generation], partial: bool) -> None:
    # The metadata of a stream come with its end.
    if _check_end(result) is None and partial:
        return
    text = result[0].text
    try:
        json.loads(text)
    except ValueError as error:
        raise OutputParserException(f"the answer is not whole JSON: {error}", llm_output=text) from error


def _check_end(result: Sequence[Generation]) -> str | None:
    """The finish reason, if it is known; raises if it says that the answer was cut."""
    first = result[0]
    metadata = first.message.response_metadata if isinstance(first, ChatGeneration) else {}
    reason: str | None = metadata.get("finish_reason")
    if reason in ("length", "abort", "error"):
        raise OutputParserException(f"the answer was cut (finish_reason={reason!r})", llm_output=first.text)
    return reason
