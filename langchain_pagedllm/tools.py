"""``bind_tools`` and ``with_structured_output``: LangChain's ways to ask for calls and for answers of a form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import BaseOutputParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass

from pagedllm.errors import InvalidRequestError

from .errors import langchain_errors
from .output_format import to_openai_tool, to_tool_choice
from .parsers import WholeCalls, WholeJson, WholePydantic, WholePydanticCalls
from .prefix import PrefixMethods

__all__ = ["ToolMethods"]

_METHODS = ("json_schema", "function_calling", "json_mode")


class ToolMethods(PrefixMethods, BaseChatModel):
    """What a chat model offers besides plain answers."""

    def bind_tools(
        self,
        tools: Sequence[Mapping[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: Mapping[str, Any] | str | bool | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The same model, with tools that it may ask to be called.

        Args:
            tools: LangChain tools, functions, pydantic classes, TypedDicts or dictionaries. ``cache_control`` in a
                dictionary, or in a tool's ``extras``, keeps the KV of all tools.
            tool_choice: ``"auto"``; ``"none"``; ``"any"``, ``"required"`` or True: call at least one; or a tool's name.
                What must be called is held to its schema by a grammar.
            strict: Refuse a schema that a grammar cannot hold a call to in all points.
            parallel_tool_calls: Whether there may be several calls in one answer.
            kwargs: Further options of a call.

        Raises:
            InvalidRequestError: A tool or choice that is none.
        """
        with langchain_errors():
            converted = [to_openai_tool(tool, strict=strict) for tool in tools]
            names = [tool["function"]["name"] for tool in converted]
            options: dict[str, Any] = {"tools": converted}
            if tool_choice is not None:
                options["tool_choice"] = to_tool_choice(tool_choice, names)
            if parallel_tool_calls is not None:
                options["parallel_tool_calls"] = parallel_tool_calls
        return self.bind(**options, **kwargs)

    def with_structured_output(
        self,
        schema: Mapping[str, Any] | type | None = None,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """The same model, answering with objects of a schema: instances of a pydantic class, else dictionaries.

        Args:
            schema: A pydantic class, a TypedDict, or a JSON schema with a title.
            method: ``"json_schema"``: a grammar holds the answer to the schema. ``"function_calling"``: the answer is
                the call of a tool that has the schema. ``"json_mode"``: as ``"json_schema"`` if there is a schema, else
                any JSON object; other models hold it to no schema, so that prompts for them say what they want.
            include_raw: Answer with ``{"raw": message, "parsed": object, "parsing_error": error}`` and raise nothing.
                LangChain then passes no options of ``invoke`` on to the model: give them here.
            strict: For ``"function_calling"``, as in ``bind_tools``. The other methods are strict by themselves.
            kwargs: Further options of a call.

        Raises:
            InvalidRequestError: A method or schema that is none.
            OutputParserException: From the answer, when it was cut or does not fit; without ``include_raw``.
        """
        with langchain_errors():
            if method not in _METHODS:
                raise InvalidRequestError.for_value("method", method, f"must be one of {', '.join(_METHODS)}")
            if schema is None and strict:
                raise InvalidRequestError.for_value("strict", strict, "there is no schema to hold an answer to")
            if schema is None and method != "json_mode":
                raise InvalidRequestError("schema: is needed, but for method='json_mode'", param="schema")
            traced = {"kwargs": {"method": method}, "schema": schema} if schema is not None else None
            if traced is not None:
                kwargs["ls_structured_output_format"] = traced
            if method == "function_calling":
                assert schema is not None
                model, parser = self._calling(schema, strict, kwargs)
            else:
                model = self.bind(response_format=_to_response_format(schema, method), **kwargs)
                parser = _pydantic_parser(schema) if _is_model(schema) else WholeJson()
        return _with_raw(model, parser) if include_raw else model | parser

    def _calling(
        self, schema: Any, strict: bool | None, options: Mapping[str, Any]
    ) -> tuple[Runnable[LanguageModelInput, AIMessage], BaseOutputParser[Any]]:
        name = to_openai_tool(schema)["function"]["name"]
        model = self.bind_tools([schema], tool_choice=name, strict=strict, parallel_tool_calls=False, **options)
        if _is_model(schema):
            return model, WholePydanticCalls(tools=[schema], first_tool_only=True)
        return model, WholeCalls(key_name=name, first_tool_only=True)


def _is_model(schema: Any) -> bool:
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def _pydantic_parser(schema: Any) -> WholePydantic:
    return WholePydantic(pydantic_object=schema)


def _to_response_format(schema: Any, method: str) -> dict[str, Any]:
    if schema is None:
        return {"type": "json_object"}
    converted = convert_to_json_schema(schema)
    if method == "json_mode":
        return {"type": "json_object", "schema": converted}
    name = converted.get("title") or "answer"
    return {"type": "json_schema", "json_schema": {"name": name, "schema": converted}}


def _with_raw(
    model: Runnable[LanguageModelInput, AIMessage], parser: BaseOutputParser[Any]
) -> Runnable[LanguageModelInput, dict[str, Any]]:
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")
