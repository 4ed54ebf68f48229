"""Every family says what transformers says, from both file formats, however its tokens are batched and cached."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import assert_at_rest, request, run, token_ids
from reference import assert_greedy, whole_prompt
from tiny_models import write_gguf, write_hf_model

from pagedllm.compute.model_runner import ModelRunner
from pagedllm.config import EngineConfig
from pagedllm.files.locate import locate_model
from pagedllm.local import LocalEngine

NUM_TOKENS = 16
SHORT, LONG = [1.0 + i / 10 for i in range(8)], [1.5 + i for i in range(8)]
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": SHORT, "long_factor": LONG}
# Variant -> family and options of its tiny model.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"tie": False}),
    "mistral-without-window": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "phi3": ("phi3", {"tie": False, "num_kv_heads": 4}),
    "phi3-gqa-window": ("phi3", {"sliding_window": 30}),
    "gemma2": ("gemma2", {}),
    "gemma2-one-kv-head": ("gemma2", {"num_kv_heads": 1, "num_layers": 4, "sliding_window": 7}),
}
# What GGUF cannot say.
FOLDER_ONLY: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-late-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma2-without-caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
}
CASES = [(variant, "safetensors") for variant in (*VARIANTS, *FOLDER_ONLY)] + [(name, "gguf") for name in VARIANTS]


@dataclasses.dataclass(frozen=True)
class Written:
    """A model in a file format, and what transformers makes of it."""

    path: str
    reference: Any

    def engine(self, **options: Any) -> LocalEngine:
        return LocalEngine(EngineConfig(model=self.path, dtype="float32", **options))


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Writes a variant once per module."""
    written: dict[tuple[str, str], Written] = {}

    def get(variant: str, form: str) -> Written:
        if (variant, form) not in written:
            folder = tmp_path_factory.mktemp(variant)
            family, options = (VARIANTS | FOLDER_ONLY)[variant]
            reference = write_hf_model(folder, family, **options)
            written[variant, "safetensors"] = Written(str(folder), reference)
            if variant in VARIANTS:
                write_gguf(folder / "model.gguf", reference)
                written[variant, "gguf"] = Written(str(folder / "model.gguf"), reference)
        return written[variant, form]

    return get


def random_prompts(lengths: tuple[int, ...], vocab_size: int = 320) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize(("variant", "form"), CASES)
@torch.inference_mode()
def test_logits(write: Any, variant: str, form: str):
    """Every number, not only the largest: a final soft cap, for one, changes no greedy text."""
    model = write(variant, form)
    runner = ModelRunner(EngineConfig(model=model.path, dtype="float32"), locate_model(model.path))
    for prompt in random_prompts((1, 70)):
        expected = model.reference(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(runner.run(whole_prompt(prompt)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("variant", "form"), CASES)
def test_greedy(write: Any, variant: str, form: str):
    """Mixed lengths in one batch, twice: the second time over cached prefixes."""
    model = write(variant, form)
    prompts = random_prompts((1, 15, 17, 40, 100))
    with model.engine() as engine:
        for _ in range(2):
            outputs = run(engine, *(request(prompt, NUM_TOKENS, ignore_eos=True) for prompt in prompts))
            for prompt, output in zip(prompts, outputs, strict=True):
                assert_greedy(model.reference, prompt, token_ids(output))
        assert outputs[-1].usage.cached_tokens == 96
        assert_at_rest(engine.stats())


@pytest.mark.parametrize("variant", [*VARIANTS, *FOLDER_ONLY])
def test_greedy_in_chunks_and_under_preemption(write: Any, variant: str):
    """A window reaches back over chunks, blocks and what is computed again."""
    model = write(variant, "safetensors")
    prompts = random_prompts((33, 50, 64, 70))
    with model.engine() as engine:
        bytes_per_token = engine.model_info().kv_bytes_per_token
    options = {
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
        "max_model_len": 100,
        "kv_cache_memory_bytes": 40 * 4 * bytes_per_token,
    }
    with model.engine(**options) as engine:
        outputs = run(engine, *(request(prompt, NUM_TOKENS, ignore_eos=True) for prompt in prompts))
        assert engine.stats().num_preemptions > 0
        assert_at_rest(engine.stats())
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(model.reference, prompt, token_ids(output))


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
@pytest.mark.parametrize(("max_model_len", "lengths"), [(64, (5, 40)), (None, (70, 120))])
def test_longrope(tmp_path: Path, form: str, max_model_len: int | None, lengths: tuple[int, ...]):
    """The short factors where no text exceeds the original context, the long ones where one may.

    transformers decides by each text's length, so the prompts of the second case are all beyond the original.
    """
    options = {"tie": False, "rope": LONG_ROPE, "original_max_position_embeddings": 64}
    reference = write_hf_model(tmp_path, "phi3", **options)
    path = tmp_path
    if form == "gguf":
        path = tmp_path / "model.gguf"
        write_gguf(path, reference)
    with Written(str(path), reference).engine(max_model_len=max_model_len) as engine:
        prompts = random_prompts(lengths)
        outputs = run(engine, *(request(prompt, NUM_TOKENS, ignore_eos=True) for prompt in prompts))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert assert_greedy(reference, prompt, token_ids(output)) == NUM_TOKENS


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "phi3"])
@torch.inference_mode()
def test_bfloat16_is_as_good_as_torch_makes_it(tmp_path: Path, family: str):
    """The 2x rule: our error against float32 is at most twice that of transformers in the same precision."""
    reference = write_hf_model(tmp_path, family, initializer_range=0.1)
    runner = ModelRunner(EngineConfig(model=str(tmp_path), dtype="bfloat16"), locate_model(str(tmp_path)))
    (prompt,) = random_prompts((150,))
    tokens = torch.tensor([prompt])
    expected = reference(tokens).logits[0]
    ours = runner.run(whole_prompt(prompt)) - expected
    theirs = reference.to(torch.bfloat16)(tokens).logits[0] - expected
    assert ours.square().mean() <= 4 * theirs.square().mean()
