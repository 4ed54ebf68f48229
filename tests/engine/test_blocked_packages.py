"""A machine that has torch, transformers, safetensors, tokenizers and numpy, and nothing else of what we can use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tiny_models import write_hf_llama

_SCRIPT = """
import sys

BLOCKED = ("gguf", "llguidance", "typer", "fastapi", "uvicorn", "langchain", "langchain_core", "langchain_pagedllm")

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
from pagedllm.api import GenerateRequest, SamplingParams
from pagedllm.config import EngineConfig
from pagedllm.local import LocalEngine

with LocalEngine(EngineConfig(model=sys.argv[1], dtype="float32", kernels="reference")) as engine:
    (output,) = engine.generate([GenerateRequest(prompt="the cache", sampling=SamplingParams(max_tokens=4))])
    print(len(output.choices[0].token_ids))
    import pagedllm.bench.gpu_check
assert not any(name in sys.modules for name in BLOCKED)
"""


def test_the_engine_runs_without_what_it_does_not_need(tmp_path: Path):
    """An import at the top of some file that only another kind of model, a server or an adapter needs."""
    write_hf_llama(tmp_path, num_layers=1)
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 1 <= int(done.stdout) <= 4
