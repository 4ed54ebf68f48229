"""Weights from safetensors and GGUF equal the model they were written from; damage is found before reading."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from tiny_models import train_tokenizer, write_gguf, write_gguf_llama, write_hf_llama, write_hf_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pagedllm.compute.models.config import load_model_config
from pagedllm.compute.weights import gguf as gguf_weights
from pagedllm.compute.weights import iter_weights
from pagedllm.compute.weights.names import expected_shapes
from pagedllm.errors import ModelFileError, UnsupportedModelError
from pagedllm.files.gguf_metadata import GGUFFile, TensorInfo, read_gguf
from pagedllm.files.locate import locate_model
from pagedllm.text.tokenizer import load_tokenizer


def read(path: Path) -> dict[str, torch.Tensor]:
    files = locate_model(str(path))
    config = load_model_config(files)
    weights = dict(iter_weights(files, config))
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == expected_shapes(config)
    return weights


def assert_same(weights: dict[str, torch.Tensor], model: Any) -> None:
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    weights.pop("rope_freqs", None)
    assert set(weights) == set(state)
    for name, expected in state.items():
        assert weights[name].dtype == expected.dtype
        assert torch.equal(weights[name], expected), name


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("max_shard_size", [None, "100KB"])
def test_safetensors(tmp_path: Path, tie: bool, max_shard_size: str | None) -> None:
    """One file or shards, tied or not: every tensor once, bit for bit."""
    model = write_hf_llama(tmp_path, tie=tie, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size is not None)
    assert_same(read(tmp_path), model)


FAMILIES = ("mistral", "qwen2", "qwen3", "phi3", "gemma2")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_families(tmp_path: Path, family: str, form: str) -> None:
    """Every tensor under its name; only llama (which stands for mistral) has rows to put back in order in GGUF."""
    model = write_hf_model(tmp_path, family, num_layers=2, tie=family == "gemma2")  # never untied
    path = tmp_path
    if form == "gguf":
        path = tmp_path / "m.gguf"
        write_gguf(path, model)
    if family == "gemma2":
        for name, parameter in model.named_parameters():
            parameter.data += 1.0 if name.endswith("norm.weight") else 0.0
    assert_same(read(path), model)


def test_quantisations_are_those_of_the_gguf_package() -> None:
    """None is forgotten when the package learns another."""
    traits = {kind.name for kind in gguf.quants._type_traits}
    assert set(gguf_weights.supported_types()) == traits | {"F32", "F16"}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_tensors_of_another_family_are_refused(tmp_path: Path, family: str) -> None:
    """A Qwen3 that calls itself otherwise has norms that would be ignored."""
    write_hf_model(tmp_path, "qwen3")
    path = tmp_path / "config.json"
    changed = {"model_type": family, "architectures": None}
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    files = locate_model(str(tmp_path))
    with pytest.raises(ModelFileError, match=rf"a {family} model does not have|missing tensors.*bias"):
        iter_weights(files, load_model_config(files))


def test_safetensors_keep_their_type(tmp_path: Path) -> None:
    """A bfloat16 model must not take twice its memory on the way in."""
    model = write_hf_llama(tmp_path).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert_same(read(tmp_path), model)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (4, 4, 16), (8, 1, 32)])
@pytest.mark.parametrize("tie", [True, False])
def test_gguf_float32(tmp_path: Path, num_heads: int, num_kv_heads: int, head_dim: int, tie: bool) -> None:
    """q and k rows come back from llama.cpp's order, for grouped, multi- and single-head KV."""
    model = write_hf_llama(tmp_path / "hf", num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, tie=tie)
    write_gguf_llama(tmp_path / "m.gguf", model)
    assert_same(read(tmp_path / "m.gguf"), model)


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0"])
def test_gguf_quantised(tmp_path: Path, quantization: str) -> None:
    """Matrices as the gguf package restores them; vectors stay exact."""
    model = write_hf_llama(tmp_path / "hf", tie=False)
    write_gguf_llama(tmp_path / "m.gguf", model, quantization=quantization)
    weights = read(tmp_path / "m.gguf")
    kind = gguf.GGMLQuantizationType[quantization]
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if values.ndim == 2:
            # Blocks run along rows, so the order of rows does not change them.
            values = dequantize(quantize(values, kind), kind)
        assert weights[name].dtype == torch.float32
        assert np.array_equal(weights[name].numpy(), values), name


@pytest.mark.parametrize("name", [name for name in gguf_weights.supported_types() if name not in ("F32", "F16")])
def test_every_block_type_is_read_row_by_row(tmp_path: Path, name: str) -> None:
    """Bytes of any supported type reach the gguf package with the right rows."""
    kind = gguf.GGMLQuantizationType[name]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    # Small bytes make small float16 scales: no NaN, which would equal nothing.
    raw = np.random.default_rng(0).integers(0, 60, (3, 2 * block_bytes)).astype(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("w", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file: GGUFFile = read_gguf(tmp_path / "m.gguf")
    info: TensorInfo = file.tensors["w"]
    assert info.shape == (3, 2 * block_size)
    tensor = gguf_weights._read_tensor(file, info, num_permuted_heads=0)
    assert torch.isfinite(tensor).all()
    assert np.array_equal(tensor.numpy(), dequantize(raw, kind))


def test_rope_factors_give_the_frequencies_of_transformers(tmp_path: Path) -> None:
    """inv_freq / rope_freqs, as ModelConfig tells the decoder, is Llama 3's rule."""
    model = write_hf_llama(tmp_path / "hf", rope_scaling=True)
    write_gguf_llama(tmp_path / "m.gguf", model)
    factors = read(tmp_path / "m.gguf")["rope_freqs"]
    inv_freq = 10_000.0 ** (-torch.arange(0, 16, 2) / 16)
    expected = LlamaRotaryEmbedding(model.config).inv_freq
    assert not torch.allclose(inv_freq, expected)
    torch.testing.assert_close(inv_freq / factors, expected)


def test_pickle_is_never_read(tmp_path: Path) -> None:
    """A pickle beside safetensors is not opened; alone it is refused."""
    model = write_hf_llama(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert_same(read(tmp_path), model)
    files = locate_model(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=r"Convert them"):
        iter_weights(files, load_model_config(files))


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors; ``__`` in a name stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, folder / "model.safetensors")


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    """Before the first tensor is yielded, that is, in the call itself."""
    write_hf_llama(tmp_path)
    files = locate_model(str(tmp_path))
    config = load_model_config(files)
    change_tensors(tmp_path, extra__weight=torch.ones(1))
    with pytest.raises(ModelFileError, match=r"does not have: extra\.weight"):
        iter_weights(files, config)
    change_tensors(tmp_path, extra__weight=None, model__norm__weight=None)
    with pytest.raises(ModelFileError, match=r"missing tensors: model\.norm\.weight"):
        iter_weights(files, config)
    change_tensors(tmp_path, model__norm__weight=torch.ones(63))
    with pytest.raises(ModelFileError, match=r"model\.norm\.weight has shape \[63\].*implies \[64\]"):
        iter_weights(files, config)
    with pytest.raises(ModelFileError, match="too few for 1000000000 layers"):
        iter_weights(files, dataclasses.replace(config, num_layers=10**9))


def test_stored_rotary_frequencies_are_harmless(tmp_path: Path) -> None:
    """Old checkpoints have them; they follow from the configuration."""
    model = write_hf_llama(tmp_path)
    name = "model__layers__0__self_attn__rotary_emb__inv_freq"
    change_tensors(tmp_path, **{name: torch.ones(8)})
    assert_same(read(tmp_path), model)


def test_tied_model_that_stores_its_output_projection(tmp_path: Path) -> None:
    """A copy is left out; a different tensor contradicts the configuration and is not silently dropped."""
    model = write_hf_llama(tmp_path)
    embedding = model.state_dict()["model.embed_tokens.weight"].clone()
    change_tensors(tmp_path, lm_head__weight=embedding)
    assert_same(read(tmp_path), model)
    change_tensors(tmp_path, lm_head__weight=embedding + 1)
    with pytest.raises(ModelFileError, match="tie_word_embeddings"):
        read(tmp_path)


def test_integer_weights_are_refused_by_name(tmp_path: Path) -> None:
    """Quantised checkpoints without a quantization_config."""
    write_hf_llama(tmp_path)
    change_tensors(tmp_path, model__norm__weight=torch.ones(64, dtype=torch.int8))
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight' is stored as I8"):
        read(tmp_path)


def test_unsupported_gguf_type_is_refused_before_reading(tmp_path: Path) -> None:
    """Naming the type and the tensor."""
    model = write_hf_llama(tmp_path / "hf")
    write_gguf_llama(tmp_path / "m.gguf", model)
    raw = bytearray((tmp_path / "m.gguf").read_bytes())
    place = raw.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    assert raw[place : place + 4] == b"\0\0\0\0"
    raw[place : place + 4] = (26).to_bytes(4, "little")
    (tmp_path / "m.gguf").write_bytes(raw)
    files = locate_model(str(tmp_path / "m.gguf"))
    with pytest.raises(UnsupportedModelError, match=r"'output_norm\.weight' is stored as I32; supported: F32"):
        iter_weights(files, load_model_config(files))


def test_gguf_with_bias_tensors_is_refused(tmp_path: Path) -> None:
    """Qwen-like biases under the name llama would be ignored silently otherwise."""
    model = write_hf_llama(tmp_path / "hf")
    bias = {f"blk.{layer}.attn_q.bias": np.ones(64, np.float32) for layer in range(2)}
    write_gguf_llama(tmp_path / "m.gguf", model, extra_tensors=bias)
    files = locate_model(str(tmp_path / "m.gguf"))
    with pytest.raises(ModelFileError, match=r"blk\.0\.attn_q\.bias, blk\.1\.attn_q\.bias"):
        iter_weights(files, load_model_config(files))


@pytest.mark.model
def test_embedded_model_answers_in_transformers() -> None:
    """An independent decoder with our weights and tokens knows the capital of France: rows and names are right."""
    files = locate_model("smollm2-135m")
    shape = load_model_config(files)
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
    model.to_empty(device="cpu")
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    missing = model.load_state_dict(dict(iter_weights(files, shape)), strict=False)
    assert missing.missing_keys == ["lm_head.weight"]
    model.tie_weights()
    tokenizer = load_tokenizer(files)
    prompt = tokenizer.encode("The capital of France is")
    with torch.no_grad():
        next_id = int(model(torch.tensor([prompt])).logits[0, -1].argmax())
    assert tokenizer.decode([next_id]) == " Paris"


def test_tiny_tokenizer_is_deterministic() -> None:
    """A folder and a GGUF file written at different times must have the same ids."""
    assert train_tokenizer().get_vocab() == train_tokenizer().get_vocab()
