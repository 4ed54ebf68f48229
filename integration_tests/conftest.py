"""Servers in processes of their own, under load and faults. Run by ``make test-slow``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class ServerProcess:
    """``pagedllm serve`` on the embedded model."""

    process: subprocess.Popen[str]
    url: str

    def rss_bytes(self) -> int:
        with open(f"/proc/{self.process.pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def serve() -> Iterator[Callable[..., ServerProcess]]:
    """Start servers with options of the command line."""
    processes: list[subprocess.Popen[str]] = []

    def start(*options: str, program: str = "from pagedllm.cli import run; run()") -> ServerProcess:
        command = [sys.executable, "-c", program, "serve", "--port", "0", *options]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"Serving .* at (http://\S+)", line):
                return ServerProcess(process, found[1])
        raise AssertionError(f"it ended with {process.wait()}")

    yield start
    for process in processes:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
