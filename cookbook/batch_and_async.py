"""Many questions at once: one by one, ``batch``, ``abatch``, as they end, and beside other work of an event loop.

Ends with a line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from langchain_core.messages import AIMessage

from langchain_pagedllm import ChatPagedLLM

CITIES = ("Paris", "Oslo", "Lima", "Cairo", "Delhi", "Quito", "Seoul", "Tunis")


def questions(count: int) -> list[str]:
    """Short questions, no two alike."""
    return [
        f"{number + 1}. Name one thing that {CITIES[number % len(CITIES)]} is known for." for number in range(count)
    ]


def one_by_one(model: ChatPagedLLM, inputs: list[str]) -> list[AIMessage]:
    """What a loop does: the engine computes one sequence at a time."""
    return [model.invoke(text) for text in inputs]


def as_completed(model: ChatPagedLLM, inputs: list[str]) -> list[int]:
    """Answers in the order in which they end: a short one does not wait for a long one."""
    lengths = [4 if number % 2 else 16 for number in range(len(inputs))]
    chains = [model.bind(max_tokens=length, ignore_eos=True) for length in lengths]

    async def answer(number: int) -> int:
        await chains[number].ainvoke(inputs[number])
        return number

    async def all_of_them() -> list[int]:
        tasks = [asyncio.create_task(answer(number)) for number in range(len(inputs))]
        return [await task for task in asyncio.as_completed(tasks)]

    return asyncio.run(all_of_them())


async def beside_other_work(model: ChatPagedLLM, inputs: list[str]) -> tuple[list[AIMessage], int]:
    """The engine has a thread of its own, so the loop goes on; gives the answers and how often it came round."""
    call = asyncio.create_task(model.abatch(inputs))
    num_rounds = 0
    while not call.done():
        await asyncio.sleep(0.005)
        num_rounds += 1
    return await call, num_rounds


def run(model: ChatPagedLLM, num_questions: int) -> dict[str, Any]:
    """All ways, over one model, with the same questions."""
    inputs = questions(num_questions)
    seconds: dict[str, float] = {}

    def timed(name: str, call: Callable[[ChatPagedLLM], Any]) -> Any:
        # With a cache of its own: KV that the way before has left would make the next one look fast.
        salted = model.model_copy(update={"cache_salt": name.replace(" ", "-").replace(",", "")})
        start = time.perf_counter()
        result = call(salted)
        seconds[name] = round(time.perf_counter() - start, 3)
        return result

    singles = timed("one by one", lambda salted: one_by_one(salted, inputs))
    batch = timed("batch", lambda salted: salted.batch(inputs))
    (abatch, num_rounds) = timed("abatch", lambda salted: asyncio.run(beside_other_work(salted, inputs)))
    limited = timed("batch, 2 at a time", lambda salted: salted.batch(inputs, config={"max_concurrency": 2}))
    order = as_completed(model, inputs)
    num_tokens = sum(message.usage_metadata["output_tokens"] for message in singles if message.usage_metadata)
    for name, value in seconds.items():
        print(f"{name:20} {value:7.2f} s  {num_tokens / value:7.1f} tokens/s")
    print(f"the event loop came round {num_rounds} times during abatch; order of ends: {order}")
    want = [message.text for message in singles]
    return {
        "seconds": seconds,
        "output_tokens": num_tokens,
        # Other rows beside a sequence may round otherwise, so a token here and there can differ.
        "equal_answers": sum(
            text == first.text == second.text == third.text
            for text, first, second, third in zip(want, batch, abatch, limited, strict=True)
        ),
        "questions": num_questions,
        "loop_rounds": num_rounds,
        "order_of_ends": order,
        "num_running_peak": model.cache_stats().num_running_peak,
    }


def main() -> None:
    """Ask the embedded model, or another one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="name or path (default: $PAGEDLLM_MODEL, else the embedded model)")
    parser.add_argument("--questions", type=int, default=8, help="how many (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=16, help="most tokens of an answer (default: %(default)s)")
    options = parser.parse_args()
    named = {"model": options.model} if options.model else {}
    model = ChatPagedLLM(temperature=0, max_tokens=options.max_tokens, **named)
    model.invoke("Hello!", max_tokens=1)  # the first call loads the model
    print(json.dumps(run(model, options.questions)))


if __name__ == "__main__":
    main()
