"""An agent with two tools, whose conversation stays in the cache from turn to turn.

The embedded model is small: left alone it seldom chooses a tool. So a middleware asks for one, which a grammar then
holds, once after each question; what it makes of the tool's answer is its own. Ends with a line of JSON.
"""

from __future__ import annotations

import argparse
import ast
import json
import operator
from collections.abc import Callable
from typing import Annotated, Any

from langchain.agents import create_agent
from langchain.agents.middleware.types import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import Field

from langchain_pagedllm import ChatPagedLLM, PagedLLMPromptCachingMiddleware

SYSTEM = (
    "You help passengers of the Tarn Pass Railway. Use a tool for each question, then answer from what it gave, in one "
    "short sentence."
)
QUESTIONS = ("How high is Coldwater?", "What is 17 * 24?", "How high is Merrow Quay?")
_HEIGHTS = {"merrow quay": 4, "alder mill": 212, "high larch": 890, "tarn pass": 1412, "coldwater": 1105}
# What the grammar holds, too: a small model that repeats itself would not end a string without it.
Short = Annotated[str, Field(max_length=16)]
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@tool
def station_height(station: Short) -> str:
    """Look up how high a station of the railway lies, in metres above the sea."""
    height = _HEIGHTS.get(station.strip().lower())
    return f"There is no station {station!r}." if height is None else f"{station} lies {height} metres above the sea."


@tool
def calculate(expression: Short) -> str:
    """Compute an expression of numbers with + - * / and parentheses, as a calculator does."""
    try:
        return f"{expression} = {_value(ast.parse(expression, mode='eval').body):g}"
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError) as error:
        return f"Cannot compute {expression!r}: {error}"


def _value(node: ast.expr) -> float:
    """Numbers and four operations; nothing else that Python could run."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return float(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError("only numbers, + - * / and parentheses")


@wrap_model_call
def one_tool_per_question(
    request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
) -> ModelResponse[Any]:
    """Ask for a call after a question, and for text after a tool's answer."""
    has_result = isinstance(request.messages[-1], ToolMessage)
    return handler(request.override(tool_choice="none" if has_result else "any"))


def run(model: ChatPagedLLM, questions: tuple[str, ...] = QUESTIONS) -> dict[str, Any]:
    """One conversation; a line for each call of the model."""
    agent: Any = create_agent(
        model,
        [station_height, calculate],
        system_prompt=SYSTEM,
        middleware=[one_tool_per_question, PagedLLMPromptCachingMiddleware(ttl="5m")],
        checkpointer=InMemorySaver(),
    )
    config = {"configurable": {"thread_id": "passenger-1"}, "recursion_limit": 12}
    turns: list[dict[str, Any]] = []
    num_messages = 0
    for question in questions:
        print(f"\nQ: {question}")
        messages = agent.invoke({"messages": [("user", question)]}, config)["messages"]
        for message in messages[num_messages:]:
            if isinstance(message, ToolMessage):
                print(f"   {message.name} -> {message.text}")
            elif isinstance(message, AIMessage):
                turns.append(_turn(message))
                print(f"   {turns[-1]}")
        num_messages = len(messages)
    return {"turns": turns}


def _turn(message: AIMessage) -> dict[str, Any]:
    assert message.usage_metadata is not None
    return {
        "calls": [[call["name"], call["args"]] for call in message.tool_calls],
        "text": message.text,
        "prompt_tokens": message.usage_metadata["input_tokens"],
        "cached_tokens": message.usage_metadata.get("input_token_details", {}).get("cache_read", 0),
    }


def main() -> None:
    """Ask the embedded model, or another one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="name or path (default: $PAGEDLLM_MODEL, else the embedded model)")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="how many (default: %(default)s)")
    options = parser.parse_args()
    named = {"model": options.model} if options.model else {}
    model = ChatPagedLLM(temperature=0, max_tokens=64, **named)
    print(json.dumps(run(model, QUESTIONS[: options.questions])))


if __name__ == "__main__":
    main()
