"""A terminal that a test types into."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time

__all__ = ["Terminal"]

# The program's standard input becomes its controlling terminal, so that the terminal turns a typed Ctrl-C into SIGINT.
_SHIM = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, sys.argv[1:])"
TIMEOUT_S = 60


class Terminal:
    """Runs a Python program in a terminal of its own; a context manager that kills it at the end."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SHIM, sys.executable, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=os.environ | {"TERM": "dumb", "PYTHONIOENCODING": "utf-8"},
        )
        os.close(slave)
        self._seen = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str) -> str:
        """Read until ``text`` is seen, and return what came before it."""
        deadline = time.monotonic() + TIMEOUT_S
        while text.encode() not in self._seen:
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} did not come; seen: {self._seen[-2000:]!r}"
            self._seen += self._read()
        before, _, self._seen = self._seen.partition(text.encode())
        return before.decode(errors="replace")

    def wait_for_end(self) -> int:
        """Read until the program has ended; its exit status."""
        deadline = time.monotonic() + TIMEOUT_S
        while select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))[0]:
            try:
                self._seen += self._read()
            except EOFError:
                break
        return self.process.wait(timeout=TIMEOUT_S)

    def _read(self) -> bytes:
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux's way to say that the other side is closed
            data = b""
        if not data:
            raise EOFError(f"the program ended; seen: {self._seen[-2000:]!r}")
        return data
