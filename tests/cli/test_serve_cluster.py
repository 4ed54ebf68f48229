"""``pagedllm serve --replicas`` as a process, and options that are about it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from conftest import TinyModel

COMMAND = [sys.executable, "-c", "from pagedllm.cli import run; run()", "serve"]


def run(*options: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=timeout_s, check=False)


def test_options_need_replicas():
    """An option that is accepted and does nothing is worse than none."""
    result = run("--max-replicas", "3")
    assert result.returncode == 2
    assert "max_replicas=3: is about several engines: give --replicas too" in result.stderr


def test_wrong_options_are_named():
    result = run("--replicas", "0")
    assert result.returncode == 2
    assert "replicas=0: must be a whole number of at least 1" in result.stderr


def test_without_ray_it_says_what_to_install(tmp_path: Path) -> None:
    """Ray is an extra: without it everything else works, and this names it."""
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError('No module named ray', name='ray')\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run(
        [*COMMAND, "--replicas", "2"], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert result.returncode == 1
    assert "pip install 'langchain-pagedllm[ray]'" in result.stderr


@pytest.mark.slow
def test_serves_until_sigterm(tiny_model: TinyModel) -> None:
    """The processes that Ray started end with it."""
    pytest.importorskip("ray")
    options = ["--replicas", "1", "--model", tiny_model.path, "--port", "0", "--shutdown-timeout", "2"]
    with subprocess.Popen([*COMMAND, *options], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = next(found[1] for line in process.stderr if (found := re.search(r"Serving .* at (http://\S+)", line)))
            body = {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False)
            assert answer.json()["usage"]["completion_tokens"] == 3
            process.send_signal(signal.SIGTERM)
            process.stderr.read()
            assert process.wait(120) == 0
        finally:
            process.kill()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", trust_env=False)
