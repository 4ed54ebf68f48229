"""What LangChain and the adapters take of the engine's speed: batches through them and past them, in turns.

Each round asks the engine itself, ``llm.batch``, the engine's chat and ``chat.abatch`` for the same answers of fixed
length, so that a noisy machine is as noisy for all. The figure is the median over rounds of the adapter's tokens per
second over the engine's own. Beside it stands what noise changes less: the CPU time that the calling thread takes for
each prompt, while the engine computes in a thread of its own. Ends with a line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from langchain_core.messages import HumanMessage

from langchain_pagedllm import ChatPagedLLM, PagedLLM

WAYS = ("engine", "llm.batch", "engine, chat", "chat.abatch")


def prompts(count: int) -> list[str]:
    """No two begin alike: the prefix cache has nothing to do with this."""
    return [f"{number} bottles stand on the wall, and one of them falls." for number in range(count)]


def run(llm: PagedLLM, chat: ChatPagedLLM, *, batch_size: int, num_rounds: int) -> dict[str, Any]:
    """Measure, after one round that warms up.

    Args:
        llm, chat: Two models of one engine, with ``max_tokens`` and ``ignore_eos``, so that all answers are as long.
    """
    engine = llm._get_engine()
    texts = prompts(batch_size)
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    caller_s: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(num_rounds + 1):
        # A salt for each measurement: nothing is found in the cache.
        for place in range(len(WAYS)):
            way = WAYS[(place + number) % len(WAYS)]
            options = {"cache_salt": f"round-{number}-{place}"}
            salted_llm, salted_chat = llm.model_copy(update=options), chat.model_copy(update=options)
            calls: dict[str, Callable[[], Any]] = {
                "engine": lambda model=salted_llm: engine.generate([model._request(prompt=text) for text in texts]),
                "llm.batch": lambda model=salted_llm: model.batch(texts),
                "engine, chat": lambda model=salted_chat: asyncio.run(
                    engine.agenerate([model._chat_request([HumanMessage(text)]) for text in texts])
                ),
                "chat.abatch": lambda model=salted_chat: asyncio.run(model.abatch(texts)),
            }
            before = engine.stats().num_generated_tokens
            start, caller_start = time.perf_counter(), time.thread_time()
            calls[way]()
            seconds, caller_seconds = time.perf_counter() - start, time.thread_time() - caller_start
            if number > 0:
                caller_s[way].append(caller_seconds / batch_size)
                rates[way].append((engine.stats().num_generated_tokens - before) / seconds)
    ratios = {
        name: [mine / own for mine, own in zip(rates[name], rates[base], strict=True)]
        for name, base in (("llm.batch", "engine"), ("chat.abatch", "engine, chat"))
    }
    return {
        "batch_size": batch_size,
        "rounds": num_rounds,
        "tokens_per_second": {way: round(statistics.median(values), 2) for way, values in rates.items()},
        "caller_ms_per_prompt": {way: round(1000 * statistics.median(values), 3) for way, values in caller_s.items()},
        "of_the_engine": {name: round(statistics.median(values), 4) for name, values in ratios.items()},
    }


def main() -> None:
    """Measure the embedded model, or another one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="name or path (default: $PAGEDLLM_MODEL, else the embedded model)")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts at once (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=16, help="of each answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="measured, besides one to warm up (default: %(default)s)")
    options = parser.parse_args()
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": options.max_tokens, "ignore_eos": True}
    if options.model:
        fields["model"] = options.model
    report = run(PagedLLM(**fields), ChatPagedLLM(**fields), batch_size=options.batch_size, num_rounds=options.rounds)
    for way, rate in report["tokens_per_second"].items():
        caller_ms = report["caller_ms_per_prompt"][way]
        print(f"{way:14} {rate:8.1f} tokens/s, {caller_ms:.2f} ms of the calling thread for each prompt")
    for name, ratio in report["of_the_engine"].items():
        print(f"{name} reaches {ratio:.1%} of the engine's own")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
