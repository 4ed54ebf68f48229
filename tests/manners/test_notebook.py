"""What a notebook does: calls inside a running event loop, cells that run again, memory that must go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conftest import TinyModel

import pagedllm
from pagedllm.config import EngineConfig
from pagedllm.registry import shared_engine

MODEL = """
from langchain_pagedllm import ChatPagedLLM


def model(max_num_seqs=8, **options):
    args = {"dtype": "float32", "max_num_seqs": max_num_seqs, "max_model_len": 512}
    return ChatPagedLLM(model=path, engine_args=args, ignore_eos=True, temperature=0, **options)


"""


def test_sync_calls_inside_a_running_loop(start_child: Callable[..., Any]) -> None:
    """asyncio.run or run_until_complete in a sync call fails there; a stream of the loop must survive the wait too."""
    script = """
        async def main():
            chat = model(max_tokens=20)
            expected = (await chat.ainvoke("one")).text
            open_stream = chat.astream("one")
            pieces = [(await open_stream.__anext__()).text]
            answers = [chat.invoke("one").text, "".join(chunk.text for chunk in chat.stream("one"))]
            answers += [message.text for message in chat.batch(["one", "one"])]
            pieces += [chunk.text async for chunk in open_stream]
            print([answer == expected for answer in [*answers, "".join(pieces)]])

        asyncio.run(main())
        """
    assert start_child(MODEL + _dedented(script)).lines() == ["[True, True, True, True, True]"]


def test_a_cell_run_again_with_another_config_closes_the_idle_engine(start_child: Callable[..., Any]) -> None:
    """Each change of an option left a model in memory, also one that the traceback of the last error still holds."""
    script = """
        model(8).invoke("one", max_tokens=2)
        try:
            model(8).invoke("one", max_tokens=10**6)
        except ValueError as error:
            last_error = error  # a notebook keeps it, with all frames
        time.sleep(1.2)
        for n in (7, 6):
            model(n).invoke("one", max_tokens=2)
            print(num_workers())
        """
    assert start_child(MODEL + _dedented(script)).lines() == ["1", "1"]


def test_max_engines_and_unload(start_child: Callable[..., Any]) -> None:
    script = """
        import pagedllm

        pagedllm.set_max_engines(2)
        for n in (1, 2, 3):
            model(n).invoke("one", max_tokens=2)
            print(num_workers())
        pagedllm.set_max_engines(1)
        print(num_workers())
        pagedllm.unload()
        print(num_workers())
        """
    assert start_child(MODEL + _dedented(script)).lines() == ["1", "2", "2", "1", "0"]


def test_the_least_recently_used_engine_goes_first(tiny_model: TinyModel) -> None:
    first, second, third = (EngineConfig(model=tiny_model.path, dtype="float32", max_num_seqs=n) for n in (1, 2, 3))
    pagedllm.set_max_engines(2)
    try:
        kept, closed = shared_engine(first), shared_engine(second)
        assert shared_engine(first) is kept
        shared_engine(third)
        assert shared_engine(first) is kept
        assert shared_engine(second) is not closed
    finally:
        pagedllm.set_max_engines(1)
        pagedllm.unload()


def _dedented(script: str) -> str:
    return "\n".join(line[8:] for line in script.split("\n"))
