"""Ctrl-C in a call that blocks the main thread."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

# Steps of about a millisecond; a whole answer takes 16,000 of them.
MOST_STEPS_AFTER_SIGNAL = 500

INTERRUPTED = """
from langchain_pagedllm import ChatPagedLLM, PagedLLM
from pagedllm.api import GenerateRequest, SamplingParams
from pagedllm.config import EngineConfig
from pagedllm.registry import shared_engine

engine = shared_engine(EngineConfig(model=path, dtype="float32"))
chat = ChatPagedLLM(model=path, engine_args={"dtype": "float32"}, ignore_eos=True, temperature=0)
text = PagedLLM(model=path, engine_args={"dtype": "float32"}, ignore_eos=True, temperature=0)
steps_at_signal = []


def make_requests():
    return [GenerateRequest(prompt=(5, 6, i), sampling=SamplingParams(ignore_eos=True)) for i in (7, 8)]


async def cell():
    chat.invoke("a cell of a notebook blocks its running loop")


# ChatPagedLLM.batch is not among them: LangChain runs it in threads, and waits for those before it lets go.
CALLS = {
    "engine.generate": lambda: engine.generate(make_requests()),
    "engine.stream": lambda: list(engine.stream(make_requests()[0])),
    "chat.invoke": lambda: chat.invoke("one"),
    "chat.stream": lambda: list(chat.stream("one")),
    "chat.invoke with timeout": lambda: chat.bind(timeout=1000).invoke("one"),
    "text.invoke": lambda: text.invoke("one"),
    "text.stream": lambda: list(text.stream("one")),
    "text.batch": lambda: text.batch(["one", "two"]),
    "notebook": lambda: asyncio.new_event_loop().run_until_complete(cell()),
}


def on_signal(*args):
    steps_at_signal.append(engine.stats().num_steps)
    signal.default_int_handler(*args)


def announce():
    while engine.stats().num_running == 0:
        time.sleep(0.01)
    print("running", flush=True)


def outcome_of(call):
    threading.Thread(target=announce).start()
    try:
        call()
        return "finished"
    except KeyboardInterrupt:
        return "interrupted"


signal.signal(signal.SIGINT, on_signal)
for name, call in CALLS.items():
    outcome = outcome_of(call)
    deadline = time.monotonic() + 20
    while (stats := engine.stats()).num_running + stats.num_waiting and time.monotonic() < deadline:
        time.sleep(0.001)
    num_left = stats.num_running + stats.num_waiting + stats.num_referenced_blocks
    num_steps = stats.num_steps - steps_at_signal[-1]
    output_tokens = chat.invoke("again", max_tokens=5).usage_metadata["output_tokens"]
    print(f"{name}: {outcome}, {num_left} left, {num_steps} steps, then {output_tokens} tokens", flush=True)
print("end", flush=True)
os._exit(0)  # the loop of "notebook" is left open, as a notebook leaves it
"""


def test_ctrl_c_aborts_the_call_and_leaves_the_engine_usable(start_child: Callable[..., Any]) -> None:
    """A request that goes on after Ctrl-C takes the engine from the next call."""
    child = start_child(INTERRUPTED)
    seen = {}
    while (line := child.read_line()) != "end":
        assert line == "running", child.finish()
        child.interrupt()
        name, _, rest = child.read_line().partition(": ")
        outcome, left, steps, after = rest.split(", ")
        assert (outcome, left, after) == ("interrupted", "0 left", "then 5 tokens"), name
        seen[name] = int(steps.split()[0])
    assert len(seen) == 9
    assert max(seen.values()) < MOST_STEPS_AFTER_SIGNAL, seen


def test_ctrl_c_ends_a_program_that_does_not_catch_it(start_child: Callable[..., Any]) -> None:
    """With the worker in the middle of an answer; as any Python program, with its traceback and by the signal."""
    script = """
        from langchain_pagedllm import ChatPagedLLM
        model = ChatPagedLLM(model=path, engine_args={"dtype": "float32"}, ignore_eos=True)
        stream = model.stream("one")
        next(stream)
        print("running", flush=True)
        for chunk in stream:
            pass
        """
    child = start_child(script)
    assert child.read_line() == "running", child.finish()
    child.interrupt()
    start = time.monotonic()
    code, lines, err = child.finish()
    assert (code, lines) == (-signal.SIGINT, [])
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert time.monotonic() - start < 15, "an answer takes longer than that"
