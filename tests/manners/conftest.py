"""A model whose answers take long enough to be interrupted, and child processes that cannot hang."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_models import write_hf_llama

TIMEOUT_S = 90
_PREAMBLE = """
import asyncio, os, signal, sys, threading, time
# A test run in a shell's background has it ignored, and hands that down.
signal.signal(signal.SIGINT, signal.default_int_handler)
path = sys.argv[1]


def num_workers():
    return sum(thread.name == "pagedllm-worker" for thread in threading.enumerate())


"""


class Child:
    """A Python process that runs a script on the model at ``path``; killed when it takes too long."""

    def __init__(self, script: str, *args: str, environ: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PREAMBLE + textwrap.dedent(script), *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        self._watchdog = threading.Timer(TIMEOUT_S, self.process.kill)
        self._watchdog.start()

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def finish(self) -> tuple[int, list[str], str]:
        """Exit status, the lines left to read, and standard error."""
        out, err = self.process.communicate()
        self._watchdog.cancel()
        return self.process.returncode, out.split("\n")[:-1], err

    def lines(self) -> list[str]:
        """What a child that must succeed quietly printed."""
        code, lines, err = self.finish()
        assert (code, err) == (0, "")
        return lines


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with room for 16,384 tokens, which take it a long time."""
    folder = tmp_path_factory.mktemp("long")
    write_hf_llama(folder, max_position_embeddings=16_384)
    return folder


@pytest.fixture
def start_child(long_model: Path) -> Iterator[Callable[..., Child]]:
    """Start a child on the long model; what still runs after the test is killed."""
    children: list[Child] = []

    def start(script: str, *args: str, environ: dict[str, str] | None = None) -> Child:
        children.append(Child(script, str(long_model), *args, environ=environ))
        return children[-1]

    yield start
    for child in children:
        child.process.kill()
        child.finish()
