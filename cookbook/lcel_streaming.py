"""One LCEL chain and the ways to stream it: pieces, async pieces, events, and an end before the end.

Ends with a line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable

from langchain_pagedllm import ChatPagedLLM, cancel_scope

PROMPT = ChatPromptTemplate.from_messages([("system", "Answer in one sentence."), ("human", "{question}")])
QUESTION = {"question": "Why is the sky blue?"}


def build_chain(model: ChatPagedLLM) -> Runnable[dict[str, Any], str]:
    """Question in, pieces of the answer out."""
    return PROMPT | model | StrOutputParser()


def stream(chain: Runnable[dict[str, Any], str]) -> tuple[str, list[float]]:
    """Print pieces as they come; gives the text and when each of them came, in seconds."""
    start, arrivals, text = time.perf_counter(), [], ""
    for piece in chain.stream(QUESTION):
        if piece:
            arrivals.append(time.perf_counter() - start)
        print(piece, end="", flush=True)
        text += piece
    print()
    return text, arrivals


async def astream(chain: Runnable[dict[str, Any], str]) -> str:
    """The same in an event loop, which goes on with its other tasks between the pieces."""
    return "".join([piece async for piece in chain.astream(QUESTION)])


async def usage_from_events(chain: Runnable[dict[str, Any], str]) -> dict[str, Any]:
    """A parser drops token counts from the stream; the events of the model have them."""
    usage: dict[str, Any] = {}
    async for event in chain.astream_events(QUESTION, version="v2"):
        if event["event"] == "on_chat_model_end":
            usage = event["data"]["output"].usage_metadata
    return usage


def stop_early(chain: Runnable[dict[str, Any], str], num_pieces: int) -> str:
    """Take a few pieces of a stream. A plain ``break`` would let LangChain read the rest of a chain with a parser; the
    scope ends the request in the engine."""
    text = ""
    with cancel_scope() as scope:
        for number, piece in enumerate(chain.stream(QUESTION), start=1):
            text += piece
            if number == num_pieces:
                scope.cancel()
                break
    return text


def run(model: ChatPagedLLM) -> dict[str, Any]:
    """All of it, over one model."""
    chain = build_chain(model)
    text, arrivals = stream(chain)
    async_text = asyncio.run(astream(chain))
    usage = asyncio.run(usage_from_events(chain))
    before = model.cache_stats().num_generated_tokens
    beginning = stop_early(chain, 3)
    stats = model.cache_stats()
    print(f"{len(arrivals)} pieces, the first after {1000 * arrivals[0]:.0f} ms; stopped after {beginning!r}")
    return {
        "pieces": len(arrivals),
        "ttft_ms": round(1000 * arrivals[0], 1),
        "total_ms": round(1000 * arrivals[-1], 1),
        "async_is_equal": async_text == text,
        "output_tokens": usage["output_tokens"],
        "cached_tokens": usage["input_token_details"]["cache_read"],
        "is_beginning": text.startswith(beginning),
        "tokens_of_stopped": stats.num_generated_tokens - before,
        "still_running": stats.num_running,
    }


def main() -> None:
    """Ask the embedded model, or another one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="name or path (default: $PAGEDLLM_MODEL, else the embedded model)")
    parser.add_argument("--max-tokens", type=int, default=32, help="most tokens of an answer (default: %(default)s)")
    options = parser.parse_args()
    named = {"model": options.model} if options.model else {}
    model = ChatPagedLLM(temperature=0, max_tokens=options.max_tokens, **named)
    model.invoke("Hello!", max_tokens=1)  # the first call loads the model
    print(json.dumps(run(model)))


if __name__ == "__main__":
    main()
