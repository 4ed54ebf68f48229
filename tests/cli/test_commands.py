"""What every command shares, and the commands that run no model."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TinyModel

from pagedllm.bench.machine import describe_machine, versions
from pagedllm.cli.env import relevant_variables
from pagedllm.cli.options import describe_engine_options
from pagedllm.config import EngineConfig

Run = Callable[..., Any]
COMMANDS = (
    ("chat",),
    ("env",),
    ("models",),
    ("plan",),
    ("bench",),
    ("bench", "throughput"),
    ("bench", "latency"),
    ("bench", "roofline"),
    ("bench", "stall"),
)


def test_version(run_cli: Run) -> None:
    result = run_cli("--version")
    assert (result.exit_code, result.stdout) == (0, f"pagedllm {importlib.metadata.version('langchain-pagedllm')}\n")


def test_the_installed_command_is_ours() -> None:
    command = [str(Path(sys.executable).with_name("pagedllm")), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("pagedllm ")


def test_help_is_quick() -> None:
    """--help that waits for torch takes seconds."""
    script = "import sys; sys.argv = ['pagedllm', '--help']\nfrom pagedllm.cli import run\ntry: run()\n"
    script += "except SystemExit: print('torch' in sys.modules, 'transformers' in sys.modules)"
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[-1] == "False False"
    assert all(command in done.stdout for (command, *_) in COMMANDS)
    assert time.monotonic() - start < 10, "a third of a second when nothing else runs"


def test_without_typer_the_error_says_what_to_install() -> None:
    script = "import sys; sys.modules['typer'] = None\nfrom pagedllm.cli import run\nrun()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip().endswith("pip install 'langchain-pagedllm[local]'")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: tuple[str, ...], run_cli: Run) -> None:
    result = run_cli(*command, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


@pytest.mark.parametrize(
    "command", [("chat",), ("bench", "throughput"), ("bench", "latency"), ("bench", "roofline"), ("bench", "stall")]
)
def test_every_engine_option_is_an_option(command: tuple[str, ...], run_cli: Run) -> None:
    """A field added to EngineConfig without a description, or of a type that the command line cannot take."""
    text = run_cli(*command, "--help").stdout
    described = describe_engine_options()
    for field in dataclasses.fields(EngineConfig):
        assert f"--{field.name.replace('_', '-')}" in text
        assert described[field.name]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("chat", "--model", "/nowhere/at/all"), 1, "no model '/nowhere/at/all'"),
        (("chat", "--max-num-seqs", "0"), 2, "max_num_seqs=0: must be a whole number"),
        (("chat", "--temperature", "-1"), 1, "temperature=-1.0: must be"),
        (("chat", "--nonsense"), 2, "No such option: --nonsense"),
        (("bench", "throughput", "--dtype", "int8"), 2, "dtype='int8': must be one of"),
        (("bench", "throughput", "--num-prompts", "8,x"), 2, "a positive number, or several with commas"),
        (("bench", "throughput", "--num-prompts", "0"), 2, "a positive number, or several with commas"),
        (("bench", "latency", "--json", "/nowhere/at/all.json"), 2, "No such file or directory"),
        (("models", "/nowhere/at/all"), 1, ""),
    ],
)
def test_errors_are_a_line(arguments: tuple[str, ...], code: int, message: str, run_cli: Run) -> None:
    result = run_cli(*arguments)
    assert result.exit_code == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("value", ["0", "two", "-1"])
def test_wrong_number_of_threads(
    value: str, tiny_model: TinyModel, run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDLLM_NUM_THREADS", value)
    result = run_cli("chat", "--model", tiny_model.path)
    assert result.exit_code == 2
    assert f"PAGEDLLM_NUM_THREADS='{value}': must be" in result.stderr


def test_number_of_threads(tiny_model: TinyModel, run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("PAGEDLLM_NUM_THREADS", str(before + 1))
    try:
        run_cli("chat", "--model", tiny_model.path, input="")
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_wrong_log_level(run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDLLM_LOG_LEVEL", "loud")
    result = run_cli("models")
    assert result.exit_code == 2
    assert "PAGEDLLM_LOG_LEVEL='loud'" in result.stderr


def test_models_describes_a_model(tiny_model: TinyModel, run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (entry,) = json.loads(run_cli("models", "--json", tiny_model.path).stdout)
    size = Path(tiny_model.path, "model.safetensors").stat().st_size
    assert entry == {
        "name": tiny_model.path,
        "path": tiny_model.path,
        "size_bytes": size,
        "architecture": "llama",
        "max_model_len": 512,
        "problem": None,
    }
    monkeypatch.setenv("PAGEDLLM_MODEL", tiny_model.path)
    text = run_cli("models").stdout
    assert tiny_model.path in text
    assert "smollm2-135m" in text
    assert "512 tokens" in text


def test_models_lists_the_cache_of_the_hub(
    tiny_model: TinyModel, tmp_path: Path, run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the names that load them, without a connection; what was not downloaded whole is told apart."""
    monkeypatch.setenv("PAGEDLLM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    repository = tmp_path / "hub" / "models--some--tiny-llama"
    for revision in ("main", "v2"):
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / revision).write_text("a" * 40)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / ("a" * 40)).symlink_to(tiny_model.path)
    (tmp_path / "hub" / "models--some--half" / "refs").mkdir(parents=True)
    (tmp_path / "hub" / "models--some--half" / "refs" / "main").write_text("b" * 40)
    found = {entry["name"]: entry["architecture"] for entry in json.loads(run_cli("models", "--json").stdout)}
    del found["smollm2-135m"]
    assert found == {"some/tiny-llama": "llama", "some/tiny-llama@v2": "llama", "some/half": None}


def test_json_for_an_option_that_is_no_plain_value(tiny_model: TinyModel, run_cli: Run) -> None:
    options = ("chat", "--model", tiny_model.path, "--max-tokens", 2, "--chat-template-kwargs")
    assert run_cli(*options, '{"thinking": false}', input="one\n").exit_code == 0
    result = run_cli(*options, "{thinking}")
    assert result.exit_code == 2
    assert "chat_template_kwargs='{thinking}': must be JSON" in result.stderr


def test_models_tells_why_one_cannot_be_used(tmp_path: Path, run_cli: Run) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    result = run_cli("models", tmp_path / "broken.gguf")
    assert result.exit_code == 1
    assert "not usable" in result.stdout


@pytest.mark.model
def test_env(run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDLLM_API_KEY", "xylophone")
    monkeypatch.setenv("PAGEDLLM_MODEL", "/nowhere/at/all")
    result = run_cli("env")
    assert result.exit_code == 0
    for expected in ("python", "torch", "threads", "memory", "cpu_flags", "SmolLM2-135M-Instruct", "does not exist"):
        assert expected in result.stdout
    assert "PAGEDLLM_API_KEY  ***" in result.stdout
    assert "xylophone" not in result.stdout


def test_secrets_are_masked() -> None:
    shown = relevant_variables(
        {
            "PAGEDLLM_API_KEY": "secret",
            "HF_TOKEN": "secret",
            "HF_HUB_OFFLINE": "1",
            "HF_ENDPOINT": "https://user:secret@example.com/hub?key=secret",
            "PAGEDLLM_BASE_URL": "http://secret@host:8000/v1",
            "OMP_NUM_THREADS": "2",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "HOME": "/home/secret",
        }
    )
    assert shown == {
        "PAGEDLLM_API_KEY": "***",
        "HF_TOKEN": "***",
        "HF_HUB_OFFLINE": "1",
        "HF_ENDPOINT": "https://***example.com/hub?***",
        "PAGEDLLM_BASE_URL": "http://***host:8000/v1",
        "OMP_NUM_THREADS": "2",
    }


def test_machine_and_versions() -> None:
    machine = describe_machine()
    assert machine["num_usable_cpus"] >= 1
    assert machine["cpu"]
    assert {"python", "torch", "langchain-core", "langchain-pagedllm"} <= set(versions())
    json.dumps(machine)
