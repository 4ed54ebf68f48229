"""``pagedllm plan``: what an engine gets, before there is one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyModel

from pagedllm.config import EngineConfig
from pagedllm.local import LocalEngine

Run = Callable[..., Any]
CONFIG = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "llama-7b.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_cache_memory_bytes": 1_000_000},
        {"kv_cache_memory_bytes": 1_000_001, "block_size": 24, "max_model_len": 300},
        {"max_num_seqs": 3, "max_model_len": 100},
    ],
)
def test_an_engine_gets_what_was_planned(
    options: dict[str, Any], tiny_model: TinyModel, run_cli: Run, tmp_path: Path
) -> None:
    """Two computations of one thing part company sooner or later."""
    arguments = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", value)]
    file = tmp_path / "plan.json"
    result = run_cli("plan", "--model", tiny_model.path, "--dtype", "float32", *arguments, "--json", file)
    assert result.exit_code == 0, result.stderr
    plan = json.loads(file.read_text())
    with LocalEngine(EngineConfig(model=tiny_model.path, dtype="float32", **options)) as engine:
        info = engine.model_info()
    assert plan["num_blocks"] == info.num_blocks
    assert plan["fitting_model_len"] == info.max_model_len
    assert plan["kv_bytes_per_token"] == info.kv_bytes_per_token


def test_a_gpu_from_the_configuration_alone(config_file: Path, run_cli: Run, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    arguments = ("--gpu-memory", "80GiB", "--gpu-memory-utilization", 0.92, "--max-model-len", 4096)
    sizes = ("--seq-len", 500, "--seq-len", 2000, "--dtype", "float16", "--json", file)
    result = run_cli("plan", "--config", config_file, *arguments, *sizes)
    assert result.exit_code == 0, result.stderr
    plan = json.loads(file.read_text())
    assert (plan["kv_bytes_per_token"], plan["block_bytes"]) == (524_288, 16 * 524_288)
    assert plan["memory_bytes"] == 80 * 2**30
    assert plan["num_blocks"] == plan["pool_bytes"] // plan["block_bytes"]
    assert [item["num_tokens"] for item in plan["sequences"]] == [500, 2000]
    for text in ("6,738,415,616 parameters", "524,288 bytes", f"{plan['num_blocks']:,}", "4096 reserved"):
        assert text in result.stdout
    assert f"lower max_num_seqs to {plan['sequences'][1]['num_paged']}" in result.stdout


def test_auto_is_bfloat16_on_a_gpu(config_file: Path, run_cli: Run) -> None:
    assert "in bfloat16" in run_cli("plan", "--config", config_file, "--gpu-memory", "80GiB").stdout


def test_what_does_not_fit_ends_with_1(config_file: Path, run_cli: Run) -> None:
    """So that a script need not read the table."""
    result = run_cli("plan", "--config", config_file, "--gpu-memory", "8GiB")
    assert result.exit_code == 1
    assert "Does not fit: there is no room for a KV block" in result.stdout
    assert run_cli("plan", "--config", config_file, "--gpu-memory", "16GiB").exit_code == 0
    result = run_cli("plan", "--config", config_file, "--gpu-memory", "16GiB", "--max-model-len", 4096)
    assert result.exit_code == 1
    assert "Does not fit: max_model_len=4096: lower it to" in result.stdout


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30),
        ("512000MiB", 512_000 * 2**20),
        ("24GB", 24 * 10**9),
        ("24 gb", 24 * 10**9),
        ("0.5TiB", 2**39),
        ("85899345920", 80 * 2**30),
        ("85899345920B", 80 * 2**30),
    ],
)
def test_sizes(text: str, size: int, config_file: Path, run_cli: Run, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert run_cli("plan", "--config", config_file, "--gpu-memory", text, "--json", file).exit_code == 0
    assert json.loads(file.read_text())["memory_bytes"] == size


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--gpu-memory", "80"), 1, ""),
        (("--gpu-memory", "much"), 2, "gpu_memory='much': must be a positive size: bytes, or a number with KiB"),
        (("--gpu-memory", "80G"), 2, "gpu_memory='80G'"),
        (("--gpu-memory", "9" * 400), 2, "gpu_memory='999"),
        (("--gpu-memory", "-1GiB"), 2, "gpu_memory='-1GiB'"),
        (("--gpu-memory", "0GiB"), 2, "gpu_memory='0GiB'"),
        (("--kv-cache-memory-bytes", "x"), 2, "kv_cache_memory_bytes='x': must be a positive size"),
        (("--gpu-memory", "80GiB", "--gpu-memory-utilization", 1.5), 2, "gpu_memory_utilization=1.5: must be in"),
        (("--gpu-memory-utilization", 0.5), 2, "gpu_memory_utilization=0.5: goes with gpu_memory"),
        (("--gpu-memory", "80GiB", "--kv-cache-memory-bytes", "1GiB"), 2, "does not go with gpu_memory"),
        (("--max-model-len", 5000), 2, "max_model_len=5000: the model's limit is 4096"),
        (("--seq-len", 5000), 2, "seq_len=5000: must be in"),
        (("--dtype", "int8"), 2, "dtype='int8': must be one of"),
        (("--model", "smollm2-135m"), 2, "does not go with model"),
    ],
)
def test_wrong_options(arguments: tuple[Any, ...], code: int, message: str, config_file: Path, run_cli: Run) -> None:
    result = run_cli("plan", "--config", config_file, *arguments)
    assert result.exit_code == code
    assert message in result.stderr


def test_models_that_cannot_be_planned(tmp_path: Path, run_cli: Run) -> None:
    for content, message in (("{", "not valid JSON"), ('{"model_type": "t5"}', "'t5' is not supported")):
        (tmp_path / "config.json").write_text(content)
        result = run_cli("plan", "--config", tmp_path / "config.json")
        assert result.exit_code == 1
        assert message in result.stderr
    for arguments, message in (
        (("--config", "/nowhere.json"), "/nowhere.json"),
        (("--model", "/nowhere"), "no model '/nowhere'"),
        (("--model", "org/model:Q4_K_M"), "a GGUF file has no config.json"),
    ):
        result = run_cli("plan", *arguments, env={"PAGEDLLM_CACHE_DIR": str(tmp_path)})
        assert result.exit_code == 1
        assert message in result.stderr


def test_a_model_of_the_hub_by_its_configuration(tmp_path: Path, run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of a model that may not fit are the last thing to download."""
    fetched = []

    def fetch(reference: Any, folder: Path) -> Path:
        fetched.append(str(reference))
        path = folder / "config.json"
        path.write_text(json.dumps(CONFIG))
        return path

    monkeypatch.setattr("pagedllm.cli.plan.fetch_config", fetch)
    monkeypatch.setenv("PAGEDLLM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PAGEDLLM_MODEL", "org/model@v1")
    result = run_cli("plan", "--gpu-memory", "80GiB")
    assert result.exit_code == 0, result.stderr
    assert "6,738,415,616 parameters" in result.stdout
    assert fetched == ["org/model@v1"]


@pytest.mark.model
def test_the_embedded_model_is_the_default(run_cli: Run) -> None:
    result = run_cli("plan", "--dtype", "float32", "--kv-cache-memory-bytes", "64MiB", "--max-model-len", 1024)
    assert result.exit_code == 0
    assert "134,515,008 parameters" in result.stdout
