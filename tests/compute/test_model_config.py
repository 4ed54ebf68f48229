"""Model shapes from config.json and GGUF metadata; what we do not compute is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_models import LLAMA3_ROPE, write_gguf, write_gguf_llama, write_hf_llama, write_hf_model

from pagedllm.compute.models.config import Llama3RopeScaling, LongRopeScaling, ModelConfig, load_model_config
from pagedllm.compute.models.registry import FAMILIES
from pagedllm.errors import ModelFileError, UnsupportedModelError
from pagedllm.files.locate import ModelFiles, locate_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
}
SCALING = {name: value for name, value in LLAMA3_ROPE.items() if name != "rope_theta"}


def load(folder: Path, config: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return load_model_config(ModelFiles("m", "folder", folder))


@pytest.fixture(scope="module")
def hf_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_hf_llama(tmp_path_factory.mktemp("hf"), tie=False, rope_scaling=True)


@pytest.mark.model
def test_embedded_model() -> None:
    """The figures of SmolLM2-135M."""
    config = load_model_config(locate_model("smollm2-135m"))
    assert config == ModelConfig(
        architecture="llama",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=pytest.approx(1e-5),
        rope_theta=100_000.0,
        rope_scaling=None,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        attention_scale=0.125,
        windows=(None,) * 30,
    )


def test_old_and_new_spelling_of_rope(tmp_path: Path) -> None:
    """transformers 5 writes rope_parameters; most published models have rope_theta and rope_scaling."""
    scaling = Llama3RopeScaling(8.0, 1.0, 4.0, 64)
    for rope in (
        {"rope_theta": 5e5, "rope_scaling": SCALING},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **SCALING}},
        {"rope_parameters": {"rope_theta": 5e5, **SCALING}},
        {"rope_theta": 5e5, "rope_parameters": SCALING},
    ):
        config = load(tmp_path, LLAMA | rope)
        assert (config.rope_theta, config.rope_scaling) == (5e5, scaling), rope


def test_defaults_of_missing_fields(tmp_path: Path) -> None:
    """Old configurations leave out what LlamaConfig has a default for."""
    config = load(tmp_path, {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"})
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert (config.rope_theta, config.rope_scaling, config.tie_word_embeddings) == (10_000.0, None, False)


def test_head_dim_of_its_own(tmp_path: Path) -> None:
    """Some models have wider heads than hidden_size / num_heads."""
    assert load(tmp_path, LLAMA | {"head_dim": 32}).head_dim == 32


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mamba"},
        {"model_type": ["llama"]},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"quantization_config": {"quant_method": "gptq"}},
        {"sliding_window": 4096},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {"attn_logit_softcapping": 50.0},
        {"query_pre_attn_scalar": 256},
        {"use_sliding_window": True},
        {"embedding_multiplier": 12.0},
        {"num_experts": 8},
    ],
)
def test_what_we_do_not_compute_is_refused_by_name(tmp_path: Path, change: dict[str, Any]) -> None:
    """Ignoring such a field gives fluent nonsense instead of an error."""
    with pytest.raises(UnsupportedModelError) as caught:
        load(tmp_path, LLAMA | change)
    value = next(iter(change.values()))
    shown = value.get("rope_type", "") if isinstance(value, dict) else value
    assert str(shown) in str(caught.value) or "partial_rotary_factor" in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "change", "field"),
    [
        ("qwen2", {"use_mrope": True}, "use_mrope=True"),
        ("qwen2", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ("phi3", {"partial_rotary_factor": 0.75}, r"partial_rotary_factor=0\.75"),
        ("phi3", {"rope_scaling": {"type": "yarn", "short_factor": [1.0] * 8}}, "type='yarn' .*su are"),
        ("phi3", {"rope_scaling": {"type": "su", "short_mscale": 1.1}}, "short_mscale"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ("gemma2", {"hidden_act": "silu"}, "hidden_act='silu'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ],
)
def test_families_refuse_their_variants(tmp_path: Path, model_type: str, change: dict[str, Any], field: str) -> None:
    """A relative of a supported model is the likeliest to be computed wrongly."""
    with pytest.raises(UnsupportedModelError, match=field):
        load(tmp_path, of_family(model_type) | change)


def of_family(model_type: str) -> dict[str, Any]:
    """A configuration that the family accepts, with every default left to it."""
    config = LLAMA | {"model_type": model_type, "architectures": [FAMILIES[model_type].class_name]}
    if model_type == "gemma2":
        del config["hidden_act"]
    return config


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_are_those_of_transformers(tmp_path: Path, model_type: str) -> None:
    """Published configurations leave out what their class has a default for, such as Mistral's window of 4096."""
    config = load(tmp_path, of_family(model_type))
    theirs = transformers.AutoConfig.for_model(**of_family(model_type))
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert config.attention_soft_cap == getattr(theirs, "attn_logit_softcapping", None)
    assert config.final_soft_cap == getattr(theirs, "final_logit_softcapping", None)
    assert config.attention_scale == getattr(theirs, "query_pre_attn_scalar", config.head_dim) ** -0.5
    window = getattr(theirs, "sliding_window", None)
    default_types = ["full_attention" if window is None else "sliding_attention"] * 3
    types = getattr(theirs, "layer_types", None) or default_types
    assert config.windows == tuple(window if kind == "sliding_attention" else None for kind in types)


def test_windows_of_qwen_and_gemma(tmp_path: Path) -> None:
    """The switch, the first layer with a window, an explicit list, and null."""
    window = {"use_sliding_window": True, "sliding_window": 32}
    for model_type, change, expected in (
        ("qwen2", {"sliding_window": 32}, (None, None, None)),
        ("qwen2", {**window, "max_window_layers": 1}, (None, 32, 32)),
        ("qwen2", {**window, "max_window_layers": 0}, (32, 32, 32)),
        ("qwen2", window, (None, None, None)),
        (
            "qwen3",
            {**window, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
            (32, None, None),
        ),
        ("gemma2", {}, (4096, None, 4096)),
        ("gemma2", {"sliding_window": None}, (None, None, None)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
    ):
        assert load(tmp_path, of_family(model_type) | change).windows == expected, (model_type, change)


def test_longrope_as_published(tmp_path: Path) -> None:
    """Phi-3's first name for it, with the original length beside the parameters; the amplitude follows from both."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    for rope_type in ("su", "longrope"):
        rope = {"original_max_position_embeddings": 64, "rope_scaling": {"type": rope_type, **factors}}
        scaling = load(tmp_path, of_family("phi3") | rope).rope_scaling
        assert scaling == LongRopeScaling((1.0,) * 8, (2.0,) * 8, 64, pytest.approx(math.sqrt(1 + math.log(8, 64))))


def test_gemma2_27b_is_known_by_its_layers(tmp_path: Path) -> None:
    """Its scalar is hidden_size / num_heads, which a GGUF file does not say."""
    options = {"num_heads": 2, "num_kv_heads": 2, "query_pre_attn_scalar": 32}
    for num_layers, expected in ((46, 32), (3, 16)):
        model = write_hf_model(tmp_path / "hf", "gemma2", num_layers=num_layers, **options)
        write_gguf(tmp_path / "m.gguf", model, metadata={"gemma2.attention.scale": 0.0})
        assert load_model_config(locate_model(str(tmp_path / "m.gguf"))).attention_scale == expected**-0.5


def test_unsupported_architecture_lists_the_supported(tmp_path: Path) -> None:
    """Said before any weight is read: there are none in this folder."""
    with pytest.raises(
        UnsupportedModelError,
        match=r"'gpt_neox' is not supported; supported: llama, mistral, qwen2, qwen3, phi3, gemma2",
    ):
        load(tmp_path, LLAMA | {"model_type": "gpt_neox"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"num_hidden_layers": 2.0}, r"num_hidden_layers is 2\.0"),
        ({"num_key_value_heads": 3}, "not a multiple of 3"),
        ({"num_key_value_heads": 8}, "not a multiple of 8"),
        ({"head_dim": 15}, "even"),
        ({"hidden_size": 3}, "head_dim is 0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": "llama3"}, "rope parameters"),
        ({"num_hidden_layers": 10**9}, "from 1 to 1024"),
        ({"rope_scaling": {"type": "su", "original_max_position_embeddings": 64}}, "short_factor is missing"),
        (
            {"rope_scaling": {"type": "su", "original_max_position_embeddings": 64, "short_factor": [1.0] * 7}},
            "a list of 8 positive numbers",
        ),
    ],
)
def test_nonsense_names_the_field(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """A wrong number must not become a shape error three layers later."""
    with pytest.raises(ModelFileError, match=message):
        load(tmp_path, LLAMA | change)


def test_config_that_is_no_json(tmp_path: Path) -> None:
    """A pointer file of Git LFS in place of the configuration is a common accident."""
    (tmp_path / "config.json").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ModelFileError, match="not valid JSON"):
        load_model_config(ModelFiles("m", "folder", tmp_path))


def test_same_model_as_folder_and_gguf(hf_model: Any, tmp_path: Path) -> None:
    """Both readers agree; only rope scaling is told differently, as factors among the weights."""
    hf_model.save_pretrained(tmp_path / "hf")
    write_gguf_llama(tmp_path / "m.gguf", hf_model)
    folder = load_model_config(locate_model(str(tmp_path / "hf")))
    file = load_model_config(locate_model(str(tmp_path / "m.gguf")))
    assert (folder.rope_scaling, folder.has_rope_freqs) == (Llama3RopeScaling(8.0, 1.0, 4.0, 64), False)
    assert (file.rope_scaling, file.has_rope_freqs) == (None, True)
    assert not folder.tie_word_embeddings
    assert not file.tie_word_embeddings
    for field in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "rope_theta"):
        assert getattr(folder, field) == getattr(file, field), field


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, "expert_count=8"),
        ({"llama.attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50"),
        ({"llama.attention.sliding_window_pattern": 6}, "sliding_window_pattern=6"),
        ({"llama.rope.scaling.type": "yarn"}, r"rope\.scaling\.type='yarn'"),
        ({"llama.rope.dimension_count": 8}, r"rope\.dimension_count=8"),
        ({"llama.attention.value_length": 8}, r"attention\.value_length=8"),
        ({"split.count": 2}, "split GGUF"),
    ],
)
def test_gguf_variants_are_refused_by_name(
    hf_model: Any, tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    """GGUF's "llama" is also what Mixtral and partly rotated models call themselves."""
    write_gguf_llama(tmp_path / "m.gguf", hf_model, metadata=metadata)
    with pytest.raises(UnsupportedModelError, match=message):
        load_model_config(locate_model(str(tmp_path / "m.gguf")))
