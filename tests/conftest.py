"""Models that tests share: the embedded one, loaded once, and a tiny random one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tiny_models import write_hf_llama

from pagedllm.config import EngineConfig
from pagedllm.local import LocalEngine
from pagedllm.registry import shared_engine, unload

# Before anything imports Triton, which looks at it once: GPU kernels are tested on the CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

SMOLLM2_FLOAT32 = EngineConfig(dtype="float32")


@pytest.fixture(scope="session")
def _engines() -> Iterator[None]:
    yield
    unload()


@pytest.fixture
def engine(_engines: None) -> LocalEngine:
    """SmolLM2-135M-Instruct in float32, shared by all tests; also what LangChain models of that configuration find."""
    return shared_engine(SMOLLM2_FLOAT32)


@pytest.fixture(scope="session")
def smollm2_reference() -> Any:
    """SmolLM2-135M-Instruct by transformers, from the same file through its own GGUF reader."""
    import torch
    import transformers

    from pagedllm.files.locate import locate_model

    path = locate_model("smollm2-135m").path
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True
    )
    return model.eval()


@dataclass(frozen=True)
class TinyModel:
    """A random three-layer Llama: its folder, and what transformers makes of it."""

    path: str
    reference: Any

    def config(self, **options: Any) -> EngineConfig:
        return EngineConfig(model=self.path, dtype="float32", **options)

    def engine(self, **options: Any) -> LocalEngine:
        return LocalEngine(self.config(**options))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder = tmp_path_factory.mktemp("tiny")
    return TinyModel(str(folder), write_hf_llama(folder))


@pytest.fixture
def tiny_engine(tiny_model: TinyModel) -> Iterator[LocalEngine]:
    with tiny_model.engine() as engine:
        yield engine
