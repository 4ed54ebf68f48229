"""Models of the hub, from a small one on this machine: what is fetched, what a fault leaves, what is said."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest
from hub_server import HubServer
from tiny_models import write_gguf, write_hf_model

from pagedllm.errors import ModelFileError, ModelLoadError, ModelNotFoundError, UnsupportedModelError
from pagedllm.files.hub import HubReference, fetch_config, parse_reference
from pagedllm.files.locate import locate_model

COMMIT, OTHER = "a" * 40, "b" * 40


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A sharded model with its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    write_hf_model(folder, "llama", tie=False, max_shard_size="100KB")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_files: dict[str, bytes]) -> Iterator[HubServer]:
    """The small hub, which huggingface_hub takes for the hub, with an empty cache in ``tmp_path``."""
    extra = {
        "README.md": b"x" * 100,
        "pytorch_model.bin": b"pickle",
        "onnx/model.onnx": b"x",
        "modeling_custom.py": b"raise SystemExit",
        "original/consolidated.safetensors": b"x",
    }
    server = HubServer({"org/model": model_files | extra}, {"main": COMMIT, "v1": OTHER})
    with server:
        monkeypatch.delenv("PAGEDLLM_CACHE_DIR", raising=False)
        set_endpoint(monkeypatch, server.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        huggingface_hub.close_session()
        yield server
        huggingface_hub.close_session()


def set_endpoint(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """What HF_ENDPOINT sets when huggingface_hub is imported."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/model", HubReference("org/model")),
        ("org/model@v1.0", HubReference("org/model", "v1.0")),
        ("org/model:Q4_K_M", HubReference("org/model", "main", "Q4_K_M")),
        ("org/model@v1:sub/a.gguf", HubReference("org/model", "v1", "sub/a.gguf")),
        *(
            (name, None)
            for name in ("model", "a/b/c", "./a", "~/a", "/a/b", "a/..", "../b", "a/b.gguf", "a/b@", "a/b:")
        ),
    ],
)
def test_names(name: str, expected: HubReference | None) -> None:
    """A path that does not exist must not become a request to the hub."""
    assert parse_reference(name) == expected


def test_fetches_what_a_model_needs_and_nothing_else(hub: HubServer, model_files: dict[str, bytes]) -> None:
    """No pickle, no code, no other format; the second time nothing at all."""
    files = locate_model("org/model")
    assert (files.kind, files.name, files.path.name) == ("folder", "org/model", COMMIT)
    assert {path.name: path.read_bytes() for path in files.path.iterdir()} == model_files
    assert sorted(hub.downloads()) == sorted(model_files)
    assert locate_model("org/model") == files
    assert len(hub.downloads()) == len(model_files)


def test_existing_path_wins_without_a_request(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder named like a repository is that folder, as everywhere in the ecosystem."""
    write_hf_model(tmp_path / "org" / "model", "llama")
    monkeypatch.chdir(tmp_path)
    assert locate_model("org/model").path == tmp_path / "org" / "model"
    assert hub.log == []


def test_revision(hub: HubServer) -> None:
    """A tag and a commit; a wrong one is named, and is no missing repository."""
    assert locate_model("org/model@v1").path.name == OTHER
    assert locate_model(f"org/model@{COMMIT}").path.name == COMMIT
    with pytest.raises(ModelNotFoundError, match="org/model has no revision 'v2'"):
        locate_model("org/model@v2")


def test_cut_transfer_is_resumed(
    hub: HubServer, model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it stopped: a shard of gigabytes must not start over."""
    shard = next(name for name in model_files if name.endswith(".safetensors"))
    hub.cut_after[shard] = 20_000
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    files = locate_model("org/model")
    assert (files.path / shard).read_bytes() == model_files[shard]
    ranges = [item for method, path, item in hub.log if method == "GET" and path.endswith(shard)]
    assert ranges == [None, "bytes=20000-"]


def test_failed_download_goes_on_the_next_time(hub: HubServer, model_files: dict[str, bytes]) -> None:
    """Files that are complete are not fetched again."""
    *_, last = shards = sorted(name for name in model_files if name.endswith(".safetensors"))
    hub.broken.add(last)
    with pytest.raises(ModelLoadError, match=r"the download from .* failed.*try again to go on"):
        locate_model("org/model")
    hub.broken.clear()
    locate_model("org/model")
    assert all(hub.downloads().count(name) == 1 for name in shards[:-1])


def test_full_disk_says_both_numbers(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first weight; and what is there already does not count."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10**12, used=0, free=250_000))
    weights = next(name for name in hub.repositories["org/model"] if name.endswith(".safetensors"))
    hub.claimed_sizes[weights] = 10**12
    with pytest.raises(ModelLoadError, match=r"takes 1000000\d{6} bytes.* has 250000 bytes free") as caught:
        locate_model("org/model")
    assert "PAGEDLLM_CACHE_DIR" in str(caught.value)
    assert not [name for name in hub.downloads() if name.endswith(".safetensors")]


def test_missing_private_and_gated_repositories(hub: HubServer) -> None:
    """Each with what to do about it."""
    hub.repositories["org/secret"] = {}
    hub.gated.add("org/secret")
    with pytest.raises(ModelNotFoundError, match=r"no repository 'org/none', or it is private.*HF_TOKEN"):
        locate_model("org/none")
    with pytest.raises(ModelNotFoundError, match=r"org/secret: it is gated. Accept its terms.*HF_TOKEN"):
        locate_model("org/secret")


def test_token_opens_a_gated_repository(
    hub: HubServer, model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """HF_TOKEN is honoured."""
    hub.gated.add("org/model")
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    assert locate_model("org/model").path.name == COMMIT


def test_offline_with_cache(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request at all, for a branch, a tag and a commit; a revision that is not cached is not another one."""
    expected = locate_model("org/model"), locate_model("org/model@v1")
    num_requests = len(hub.log)
    go_offline(monkeypatch)
    assert (locate_model("org/model"), locate_model("org/model@v1")) == expected
    assert locate_model(f"org/model@{COMMIT}").path == expected[0].path
    with pytest.raises(ModelNotFoundError, match=r"org/model@v2: HF_HUB_OFFLINE"):
        locate_model("org/model@v2")
    assert len(hub.log) == num_requests


def test_offline_without_cache(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Says what forbids it, where it looked and what to do."""
    go_offline(monkeypatch)
    with pytest.raises(ModelNotFoundError, match=r"HF_HUB_OFFLINE.*HF_ENDPOINT.*local copy") as caught:
        locate_model("org/model")
    assert str(tmp_path / "cache") in str(caught.value)
    assert hub.log == []


def test_unreachable_hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The cache serves, with a warning; without one the address is named."""
    files = locate_model("org/model")
    set_endpoint(monkeypatch, "http://127.0.0.1:9")
    assert locate_model("org/model") == files
    assert "using the cached copy" in caplog.text
    with pytest.raises(ModelNotFoundError, match=r"http://127\.0\.0\.1:9 cannot be asked"):
        locate_model("org/other")


def test_local_only_asks_nobody(hub: HubServer) -> None:
    """LangChain's profile looks at a model in passing."""
    with pytest.raises(ModelNotFoundError, match="not in the cache"):
        locate_model("org/model", local_only=True)
    assert hub.log == []
    files = locate_model("org/model")
    num_requests = len(hub.log)
    assert locate_model("org/model", local_only=True) == files
    assert len(hub.log) == num_requests


def test_cache_folder_of_our_own(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PAGEDLLM_CACHE_DIR moves it."""
    monkeypatch.setenv("PAGEDLLM_CACHE_DIR", str(tmp_path / "own"))
    assert tmp_path / "own" in locate_model("org/model").path.parents


def test_interrupted_download_is_seen_offline(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached index whose shards are missing is no model."""
    files = locate_model("org/model")
    next(files.path.glob("*.safetensors")).unlink()
    go_offline(monkeypatch)
    with pytest.raises(ModelFileError, match="may be incomplete"):
        locate_model("org/model")


GGUFS = {name: name.encode() for name in ("m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "mmproj-m-f16.gguf")}


@pytest.mark.parametrize(
    ("files", "name", "expected"),
    [
        (GGUFS, "org/g:q8_0", "m-Q8_0.gguf"),
        (GGUFS, "org/g:m-Q4_K_S.gguf", "m-Q4_K_S.gguf"),
        (GGUFS, "org/g", "m-Q4_K_M.gguf"),
        ({"only.gguf": b"1", "config.json": b"{}"}, "org/g", "only.gguf"),
        ({"a/m-q4_0.gguf": b"1", "b/m-q5_0.gguf": b"2"}, "org/g@main:Q5_0", "b/m-q5_0.gguf"),
    ],
)
def test_gguf_repositories(hub: HubServer, files: dict[str, bytes], name: str, expected: str) -> None:
    """One file is fetched, of several the one that the tag names."""
    hub.repositories["org/g"] = files
    found = locate_model(name)
    assert (found.kind, found.path.read_bytes()) == ("gguf", files[expected])
    assert hub.downloads() == [expected]
    assert locate_model(name, local_only=True) == found


@pytest.mark.parametrize(
    ("files", "name", "error", "message"),
    [
        (GGUFS, "org/g:Q4_K", ModelNotFoundError, r"no GGUF file matches 'Q4_K'; name one as org/g:.*m-Q8_0\.gguf"),
        (GGUFS, "org/g:f16", ModelNotFoundError, "no GGUF file matches"),
        ({"a-Q8_0.gguf": b"", "b-Q8_0.gguf": b""}, "org/g:Q8_0", ModelNotFoundError, "several GGUF files match"),
        ({"a-Q8_0.gguf": b"", "b-Q5_0.gguf": b""}, "org/g", ModelNotFoundError, "no GGUF file matches 'Q4_K_M'"),
        ({"m-Q8_0-00001-of-00002.gguf": b""}, "org/g:Q8_0", UnsupportedModelError, "split GGUF"),
        ({"pytorch_model.bin": b"", "config.json": b"{}"}, "org/g", UnsupportedModelError, "only as pickle"),
        ({"README.md": b""}, "org/g", ModelNotFoundError, r"no model.*the repository has README\.md"),
    ],
)
def test_unusable_repositories(
    hub: HubServer, files: dict[str, bytes], name: str, error: type[Exception], message: str
) -> None:
    """Seen from the list of files, before anything is fetched."""
    hub.repositories["org/g"] = files
    with pytest.raises(error, match=message):
        locate_model(name)
    assert hub.downloads() == []


def test_engine_by_environment_alone(hub: HubServer, tmp_path: Path, model_files: dict[str, bytes]) -> None:
    """HF_ENDPOINT and HF_HOME, then HF_HUB_OFFLINE, in processes of their own: the engine generates from the hub."""
    write_gguf(tmp_path / "m.gguf", write_hf_model(tmp_path / "tiny", "qwen2"))
    hub.repositories["org/tiny-GGUF"] = {"m-F32.gguf": (tmp_path / "m.gguf").read_bytes()}
    script = """
        from pagedllm.api import GenerateRequest, SamplingParams
        from pagedllm.config import EngineConfig
        from pagedllm.local import LocalEngine
        for model in ("org/model", "org/tiny-GGUF:F32"):
            with LocalEngine(EngineConfig(model=model, dtype="float32")) as engine:
                request = GenerateRequest(prompt="the cache", sampling=SamplingParams(max_tokens=4, temperature=0))
                (output,) = engine.generate([request])
                print(model, output.usage.completion_tokens)
    """
    lines = [line[8:] for line in script.splitlines()]
    environment: dict[str, Any] = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    environment.pop("PAGEDLLM_CACHE_DIR", None)
    outputs = []
    for offline in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", "\n".join(lines)],
            env=environment | {"HF_HUB_OFFLINE": offline},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
        num_requests = len(hub.log)
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) == 2
    assert len(hub.log) == num_requests
    assert (tmp_path / "home" / "hub").is_dir()


def test_the_configuration_alone(hub: HubServer, model_files: dict[str, bytes], tmp_path: Path) -> None:
    """Who plans for a large model must not wait for its weights, nor find half a model in the cache afterwards."""
    path = fetch_config(HubReference("org/model", "v1"), tmp_path / "here")
    assert path.read_bytes() == model_files["config.json"]
    assert {file for _, file, _ in hub.log if "resolve" in file} == {"/org/model/resolve/v1/config.json"}
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("reference", "error", "message"),
    [
        (HubReference("org/none"), ModelNotFoundError, "no repository 'org/none'"),
        (HubReference("org/model", "v9"), ModelNotFoundError, "no revision 'v9'"),
        (HubReference("org/bare"), ModelNotFoundError, "has no config.json"),
        (HubReference("org/gated"), ModelNotFoundError, "gated"),
        (HubReference("org/broken"), ModelLoadError, "config.json cannot be downloaded"),
    ],
)
def test_the_configuration_that_cannot_be_had(
    reference: HubReference, error: type[Exception], message: str, hub: HubServer, tmp_path: Path
) -> None:
    hub.repositories |= {name: {"config.json": b"{}"} for name in ("org/gated", "org/broken")} | {"org/bare": {}}
    hub.gated.add("org/gated")
    if reference.repo_id == "org/broken":
        hub.broken.add("config.json")
    with pytest.raises(error, match=message):
        fetch_config(reference, tmp_path / "here")
