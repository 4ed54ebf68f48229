"""Small random Llama models with a tokenizer, as a Hugging Face folder and as a GGUF file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from gguf.quants import quantize
from tokenizers import decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_CORPUS = (
    "the cache holds the keys and the values of the tokens that came before",
    "a block is shared only when it is full and only after it is written",
    "Zażółć gęślą jaźń, 你好世界, emoji 😀😃 and the numbers 0 1 2 3 4 5 6 7 8 9",
    "def main():\n    return the_value + 1\n",
)


def train_tokenizer(vocab_size: int = 320) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer (GPT-2's pre-tokenizer) that can spell any text. Special tokens have ids 0, 1, 2."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def write_hf_llama(
    folder: Path,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    tie: bool = True,
    rope_scaling: bool = False,
    seed: int = 0,
    max_shard_size: str | int | None = None,
    max_position_embeddings: int = 512,
    num_layers: int = 3,
    head_dim: int = 16,
) -> Any:
    """Write a random ``LlamaForCausalLM`` with tokenizer and chat template; hidden size 64, 320 tokens, float32.

    Weights are wide enough that greedy text is not one repeated token and that a wrong layer shows in the logits.

    Args:
        rope_scaling: Use Llama 3's rule with an original length of 64 tokens.
        max_shard_size: Largest shard, such as ``"100KB"``; None: one file.

    Returns:
        The transformers model, in evaluation mode.
    """
    tokenizer = train_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie,
        rope_parameters=dict(LLAMA3_ROPE) if rope_scaling else {"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.data.uniform_(0.5, 1.5)
    model.requires_grad_(False)
    model.save_pretrained(folder, **({} if max_shard_size is None else {"max_shard_size": max_shard_size}))
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    return model


def write_gguf_llama(
    path: Path,
    model: Any,
    tokenizer: tokenizers.Tokenizer | None = None,
    *,
    quantization: str = "F32",
    metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> None:
    """Write a transformers Llama model as llama.cpp's converter does: q and k rows interleaved, rope factors stored.

    Args:
        tokenizer: The model's; None: the one of ``write_hf_llama``.
        quantization: Of the matrices, ``"F32"``, ``"F16"``, ``"BF16"`` or ``"Q8_0"``; vectors are always F32.
        metadata: Further entries (text, whole numbers, booleans), or other values for some.
        extra_tensors: Tensors that a Llama model does not have, by their names in the file.
    """
    tokenizer = tokenizer or train_tokenizer()
    writer = gguf.GGUFWriter(path, "llama")
    entries = _model_metadata(model.config) | _tokenizer_metadata(tokenizer) | (metadata or {})
    for key, value in entries.items():
        _add(writer, key, value)
    for name, values in (_gguf_tensors(model) | (extra_tensors or {})).items():
        if values.ndim == 1 or quantization == "F32":
            writer.add_tensor(name, values)
        elif quantization == "F16":
            writer.add_tensor(name, values.astype(np.float16))
        else:
            kind = gguf.GGMLQuantizationType[quantization]
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _model_metadata(config: Any) -> dict[str, Any]:
    return {
        "llama.vocab_size": config.vocab_size,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "llama.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "llama.rope.dimension_count": config.head_dim,
    }


def _tokenizer_metadata(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    bpe = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL_TOKENS else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in bpe["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _gguf_tensors(model: Any) -> dict[str, np.ndarray]:
    config = model.config
    state = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        tensors["output.weight"] = state["lm_head.weight"]
    if config.rope_parameters["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = rope_factors(config)
    for layer in range(config.num_hidden_layers):
        for gguf_name, name in {
            "attn_norm": "input_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        }.items():
            values = state[f"model.layers.{layer}.{name}.weight"]
            if gguf_name in ("attn_q", "attn_k"):
                values = interleave(values, config.head_dim)
            tensors[f"blk.{layer}.{gguf_name}.weight"] = np.ascontiguousarray(values)
    return tensors


def interleave(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """llama.cpp's row order of q and k: row i of a head beside row i + head_dim/2."""
    order = [half * (head_dim // 2) + i for i in range(head_dim // 2) for half in (0, 1)]
    heads = rows.reshape(-1, head_dim, rows.shape[-1])
    return np.ascontiguousarray(heads[:, order].reshape(rows.shape))


def rope_factors(config: Any) -> np.ndarray:
    """Divisors of the rotary frequencies under Llama 3's rule, float32 ``[head_dim / 2]``."""
    rope = config.rope_parameters
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for i in range(config.head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * i / config.head_dim)
        # 0 below the low frequency bound, 1 above the high one.
        share = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - share) / rope["factor"] + share))
    return np.array(factors, np.float32)
