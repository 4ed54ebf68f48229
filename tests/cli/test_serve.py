"""``pagedllm serve`` as a process, and its options."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagedllm.server.auth import KEY_VARIABLE, KEYS_VARIABLE

COMMAND = [sys.executable, "-c", "from pagedllm.cli import run; run()", "serve", "--port", "0"]
LONG = {"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True, "stream": True}


@contextmanager
def served(model: str, *options: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its URL."""
    with subprocess.Popen(
        [*COMMAND, "--model", model, *options],
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != KEY_VARIABLE} | environment,
    ) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := re.search(r"Serving .* at (http://\S+)", line):
                    break
            else:
                pytest.fail(f"it ended with {process.wait()}")
            url = found[1]
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                try:
                    httpx.get(f"{url}/health", trust_env=False)
                    break
                except httpx.ConnectError:
                    time.sleep(0.02)
            yield process, url
        finally:
            process.kill()


class Client(threading.Thread):
    """Reads a stream to its end."""

    def __init__(self, url: str, **fields: Any) -> None:
        super().__init__()
        self._url, self._body = f"{url}/v1/completions", LONG | fields
        self.has_begun = threading.Event()
        self.lines: list[str] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60, trust_env=False) as response:
                for line in response.iter_lines():
                    self.lines += [line] if line else []
                    self.has_begun.set()
        except httpx.HTTPError as error:
            self.error = error


# Long enough to be caught in the middle on any machine.
SLOW = {"n": 100, "max_tokens": 400}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_lets_running_requests_end(tiny_model: Any, number: signal.Signals) -> None:
    """Rolling updates must not cut answers."""
    with served(tiny_model.path) as (process, url):
        client = Client(url)
        client.start()
        assert client.has_begun.wait(30)
        process.send_signal(number)
        client.join(60)
        assert client.error is None
        assert client.lines[-1] == "data: [DONE]"
        assert process.wait(30) == 0


def test_drain_has_an_end(tiny_model: Any) -> None:
    """What still runs after the time given is told so, as the stream's last event."""
    with served(tiny_model.path, "--shutdown-timeout", "0.2") as (process, url):
        client = Client(url, **SLOW)
        client.start()
        assert client.has_begun.wait(30)
        process.send_signal(signal.SIGTERM)
        client.join(60)
        assert client.error is None
        assert json.loads(client.lines[-1].removeprefix("data: "))["error"]["code"] == "engine_closed"
        assert process.wait(30) == 0


def test_second_signal_ends_at_once(tiny_model: Any) -> None:
    """Whoever presses Ctrl-C twice does not want to wait for anybody."""
    with served(tiny_model.path, "--shutdown-timeout", "600") as (process, url):
        client = Client(url, **SLOW)
        client.start()
        assert client.has_begun.wait(30)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 1
        client.join(60)
        assert client.error is not None


def test_keys_from_the_environment(tiny_model: Any) -> None:
    environment = {KEYS_VARIABLE: "alice secret-of-alice", KEY_VARIABLE: "secret-of-root"}
    with served(tiny_model.path, **environment) as (_, url):
        for secret, status in (("secret-of-alice", 403), ("secret-of-root", 200), ("wrong", 401)):
            headers = {"Authorization": f"Bearer {secret}"}
            assert httpx.get(f"{url}/metrics", headers=headers, trust_env=False).status_code == status


def test_config_file(tiny_model: Any, tmp_path: Path) -> None:
    """A file says what the command line could, and the command line comes first."""
    path = tmp_path / "serve.toml"
    path.write_text(
        "[engine]\nblock_size = 8\nmax_num_seqs = 3\nchat_template_kwargs = {enable_thinking = false}\n"
        '[server]\nserved_model_name = "from-file"\nmax_prompts = 2\n'
    )
    with served(tiny_model.path, "--config", str(path), "--max-prompts", "1") as (_, url):
        (entry,) = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]
        assert entry["id"] == "from-file"
        assert entry["pagedllm"]["block_size"] == 8
        body = {"prompt": ["a", "b"], "max_tokens": 1}
        assert "at most 1" in httpx.post(f"{url}/v1/completions", json=body, trust_env=False).text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blok_size = 8", "unknown option 'blok_size'"),
        ("[server]\nhots = 'x'", "unknown option 'hots'"),
        ("block_size = 8\n[engine]\nblock_size = 9", "given twice"),
        ("block_size = ", "is not TOML"),
        ("block_size = 'many'", "block-size"),
    ],
)
def test_bad_config_files(run_cli: Callable[..., Any], tmp_path: Path, text: str, message: str) -> None:
    """A misspelt option in a file must not be ignored."""
    path = tmp_path / "serve.toml"
    path.write_text(text)
    result = run_cli("serve", "--config", path)
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--host", "0.0.0.0"), "API keys"),
        (("--config", "/no/such/file"), "No such file"),
        (("--api-key-file", "/no/such/file"), "cannot be read"),
        (("--request-timeout", "0"), "request_timeout_s"),
        (("--max-prompts", "0"), "max_prompts"),
        (("--port", "99999"), "port"),
    ],
)
def test_bad_options(run_cli: Callable[..., Any], options: tuple[str, ...], message: str) -> None:
    """Refused before a model is loaded."""
    result = run_cli("serve", "--model", "/no/such/model", *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_port_that_is_taken(run_cli: Callable[..., Any], tiny_model: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = run_cli("serve", "--model", tiny_model.path, "--port", other.getsockname()[1])
    assert result.exit_code == 2
    assert "cannot listen" in result.stderr
