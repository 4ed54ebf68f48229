"""Who ends what: aborts, threads, event loops, death, close, fork, and the shared registry."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conftest import TinyModel
from engine_helpers import ids, request, run, wait_until_at_rest

from pagedllm.api import Engine
from pagedllm.config import EngineConfig
from pagedllm.errors import (
    EngineClosedError,
    EngineDeadError,
    ForkedProcessError,
    InvalidRequestError,
    ModelNotFoundError,
)
from pagedllm.local import LocalEngine
from pagedllm.registry import shared_engine, unload

LONG = 400


def prompt(seed: int, length: int = 20) -> list[int]:
    return [3 + (item + seed) % 300 for item in ids(length, seed)]


def endless(seed: int = 0) -> Any:
    return request(prompt(seed), LONG, ignore_eos=True)


def test_obeys_the_protocol(tiny_engine: LocalEngine):
    assert isinstance(tiny_engine, Engine)


def test_closing_a_stream_aborts_it(tiny_engine: LocalEngine):
    stream = tiny_engine.stream(endless())
    next(stream)
    stream.close()
    assert wait_until_at_rest(tiny_engine).num_generated_tokens < LONG
    assert list(stream) == []


def test_dropping_a_stream_aborts_it(tiny_engine: LocalEngine):
    """Also when nothing was ever read from it."""
    started = tiny_engine.stream(endless(1))
    next(started)
    unread = tiny_engine.stream(endless(2))
    del started, unread
    gc.collect()
    assert wait_until_at_rest(tiny_engine).num_generated_tokens < 2 * LONG


def test_abort_by_id_ends_the_stream_with_that_reason(tiny_engine: LocalEngine):
    one = endless()
    stream = tiny_engine.stream(one)
    next(stream)
    tiny_engine.abort(one.request_id)
    chunks = list(stream)
    assert chunks[-1].finish_reason == "abort"
    assert chunks[-1].usage is not None
    wait_until_at_rest(tiny_engine)


def test_abort_reaches_a_queued_request(tiny_model: TinyModel):
    with tiny_model.engine(max_num_seqs=1) as engine:
        running = engine.stream(endless(1))
        next(running)
        queued = engine.stream(endless(2))
        queued.close()
        running.close()
        assert wait_until_at_rest(engine).num_generated_tokens < LONG


async def test_cancelling_a_task_aborts_its_requests(tiny_engine: LocalEngine):
    task = asyncio.create_task(tiny_engine.agenerate([endless(1), endless(2)]))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert wait_until_at_rest(tiny_engine).num_generated_tokens < 2 * LONG


async def test_leaving_an_async_stream_aborts_it(tiny_engine: LocalEngine):
    async for _ in tiny_engine.astream(endless()):
        break
    gc.collect()
    assert wait_until_at_rest(tiny_engine).num_generated_tokens < LONG


def test_two_event_loops_in_a_row(tiny_engine: LocalEngine):
    """A client bound to the first loop would fail in the second."""
    texts = [asyncio.run(tiny_engine.agenerate([request(prompt(3), 10)]))[0].text for _ in range(2)]
    assert texts[0] == texts[1]


def test_a_loop_that_ends_early_leaves_nothing_running(tiny_engine: LocalEngine):
    async def leave() -> None:
        stream = tiny_engine.astream(endless())
        await stream.__anext__()

    asyncio.run(leave())
    gc.collect()
    wait_until_at_rest(tiny_engine)


def test_many_threads_get_their_own_answers(tiny_engine: LocalEngine):
    requests = [request(prompt(i), 30) for i in range(16)]
    alone = [run(tiny_engine, item)[0].text for item in requests]
    again = [request(prompt(i), 30) for i in range(16)]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda item: run(tiny_engine, item)[0].text, again))
    assert together == alone


def test_a_batch_runs_together(tiny_engine: LocalEngine):
    run(tiny_engine, *(endless(i) for i in range(8)))
    assert tiny_engine.stats().num_running_peak == 8


async def test_the_event_loop_stays_responsive(tiny_engine: LocalEngine):
    worst = 0.0

    async def heartbeat() -> None:
        nonlocal worst
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.05)
            worst = max(worst, time.monotonic() - before - 0.05)

    beat = asyncio.create_task(heartbeat())
    await asyncio.gather(*(tiny_engine.agenerate([endless(i)]) for i in range(8)))
    beat.cancel()
    assert worst < 1.0


def test_a_slow_consumer_gets_merged_deltas(tiny_engine: LocalEngine):
    """The worker never waits for a consumer, and a consumer that sleeps does not fill the memory."""
    stream = tiny_engine.stream(endless())
    wait_until_at_rest(tiny_engine)
    chunks = list(stream)
    assert sum(len(chunk.token_ids) for chunk in chunks) == LONG
    assert len(chunks) < LONG
    text = "".join(chunk.text for chunk in chunks)
    assert text == run(tiny_engine, endless())[0].text


def test_a_request_id_in_flight_is_refused(tiny_engine: LocalEngine):
    one = endless()
    first = tiny_engine.stream(one)
    next(first)
    with pytest.raises(InvalidRequestError, match="already in flight"):
        next(tiny_engine.stream(one))
    assert next(first).finish_reason is None, "the first one goes on"
    first.close()


def test_a_dead_worker_fails_every_waiter_with_the_cause(tiny_model: TinyModel, caplog: pytest.LogCaptureFixture):
    engine = tiny_model.engine(max_num_seqs=2)
    core = engine._worker._core
    assert core is not None
    real_step, steps = core.step, 0

    def failing_step() -> Any:
        nonlocal steps
        steps += 1
        if steps > 20:
            raise RuntimeError("out of memory, say")
        return real_step()

    core.step = failing_step  # type: ignore[method-assign]
    results: list[Any] = []

    def wait(seed: int) -> None:
        results.append(engine.generate([endless(seed)])[0])

    threads = [threading.Thread(target=wait, args=(i,)) for i in range(4)]  # two run, two wait
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive(), "a waiter hangs"
    assert [type(result) for result in results] == [EngineDeadError] * 4
    assert all("out of memory, say" in str(result) and result.__cause__ is not None for result in results)
    assert not engine.health().ok
    for call in (engine.stats, engine.reset_prefix_cache, lambda: next(engine.stream(endless()))):
        with pytest.raises(EngineDeadError):
            call()
    engine.close()


def test_close_ends_what_is_in_flight_and_frees_the_model(tiny_model: TinyModel):
    engine = tiny_model.engine()
    runner = weakref.ref(engine._worker._core.model_runner)  # type: ignore[union-attr]
    stream = engine.stream(endless())
    next(stream)
    engine.close()
    with pytest.raises(EngineClosedError):
        list(stream)
    with pytest.raises(EngineClosedError):
        engine.stats()
    gc.collect()
    assert runner() is None
    engine.close()


def test_an_engine_that_nobody_holds_stops(tiny_model: TinyModel):
    engine = tiny_model.engine()
    thread = engine._worker._thread
    run(engine, request(prompt(0), 3))
    del engine
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_a_stream_keeps_its_engine(tiny_model: TinyModel):
    stream = tiny_model.engine().stream(request(prompt(0), 50, ignore_eos=True))
    gc.collect()
    assert sum(len(chunk.token_ids) for chunk in stream) == 50


def test_the_registry_finds_an_engine_by_value(tiny_model: TinyModel):
    config = EngineConfig(model=tiny_model.path, dtype="float32")
    with ThreadPoolExecutor(4) as pool:
        engines = set(pool.map(lambda _: shared_engine(EngineConfig(model=tiny_model.path, dtype="float32")), range(8)))
    assert len(engines) == 1
    (engine,) = engines
    engine.close()
    assert shared_engine(config) is not engine, "a closed engine is replaced"
    unload()


def test_the_registry_keeps_one_idle_engine_but_never_a_busy_one_less(tiny_model: TinyModel):
    first, second, third = (EngineConfig(model=tiny_model.path, dtype="float32", max_num_seqs=n) for n in (1, 2, 3))
    idle = weakref.ref(shared_engine(first))
    busy = shared_engine(second)
    gc.collect()
    assert idle() is None
    stream = busy.stream(endless())
    next(stream)
    shared_engine(third)
    assert shared_engine(second) is busy
    stream.close()
    unload()
    with pytest.raises(EngineClosedError):
        busy.stats()


def test_a_failed_load_leaves_the_registry_usable(tiny_model: TinyModel):
    with pytest.raises(ModelNotFoundError):
        shared_engine(EngineConfig(model="/nowhere/at/all"))
    assert run(shared_engine(EngineConfig(model=tiny_model.path, dtype="float32")), request(prompt(0), 2))
    unload()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_use_after_fork_is_a_clear_error(tiny_engine: LocalEngine):
    run(tiny_engine, request(prompt(0), 2))
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer = b"no error"
        try:
            tiny_engine.generate([request(prompt(0), 2)])
        except ForkedProcessError:
            answer = b"refused"
        finally:
            os.write(write_end, answer)
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read_end, 100) == b"refused"
    os.close(read_end)
    os.close(write_end)
    run(tiny_engine, request(prompt(0), 2))


@pytest.mark.parametrize("ending", ["pass", "sys.exit(0)", "raise SystemExit"])
def test_interpreter_exit_with_a_live_worker(ending: str, tiny_model: TinyModel):
    """Neither a hang nor a crash, even in the middle of a generation."""
    code = (
        "import sys\n"
        "from pagedllm.api import GenerateRequest, SamplingParams\n"
        "from pagedllm.config import EngineConfig\n"
        "from pagedllm.registry import shared_engine\n"
        f"engine = shared_engine(EngineConfig(model={tiny_model.path!r}, dtype='float32'))\n"
        "stream = engine.stream(GenerateRequest(prompt=(5, 6, 7), sampling=SamplingParams(ignore_eos=True)))\n"
        "next(stream)\n"
        f"{ending}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
