"""Small random models of every family with a tokenizer, as a Hugging Face folder and as a GGUF file."""

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


FAMILY_OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 20},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    # Caps low enough to change most scores and logits, and a scalar that is not head_dim.
    "gemma2": {
        "sliding_window": 20,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 24,
        "attn_implementation": "eager",
    },
}
"""What sets the tiny model of each family apart, besides its class."""


def write_hf_model(
    folder: Path,
    family: str,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    tie: bool = True,
    seed: int = 0,
    max_shard_size: str | int | None = None,
    max_position_embeddings: int = 512,
    num_layers: int = 3,
    head_dim: int = 16,
    rope: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Write a random model with tokenizer and chat template; hidden size 64, 320 tokens, float32.

    Weights are wide enough that greedy text is not one repeated token and that a wrong layer shows in the logits.

    Args:
        family: A key of ``FAMILY_OPTIONS``.
        max_shard_size: Largest shard, such as ``"100KB"``; None: one file.
        rope: Rotary parameters; None: no scaling.
        options: Of the transformers configuration, over those of ``FAMILY_OPTIONS``.

    Returns:
        The transformers model, in evaluation mode.
    """
    tokenizer = train_tokenizer()
    # Phi-3 knows no head_dim of its own: 64 / num_heads.
    widths = {} if family == "phi3" else {"head_dim": head_dim}
    config = transformers.AutoConfig.for_model(
        family,
        **{
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "max_position_embeddings": max_position_embeddings,
            "tie_word_embeddings": tie,
            "rope_parameters": dict(rope or {"rope_type": "default", "rope_theta": 10_000.0}),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "initializer_range": 0.2,
        }
        | widths
        | FAMILY_OPTIONS[family]
        | options,
    )
    model = _random_model(config, seed)
    model.save_pretrained(folder, **({} if max_shard_size is None else {"max_shard_size": max_shard_size}))
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    return model


def _random_model(config: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.data.uniform_(0.5, 1.5)
                # Gemma's norms add 1 to their weights.
                parameter.data -= 1.0 if config.model_type == "gemma2" else 0.0
            elif name.endswith(".bias"):
                parameter.data.uniform_(-1.0, 1.0)
    model.requires_grad_(False)
    return model


def write_hf_llama(folder: Path, *, rope_scaling: bool = False, **options: Any) -> Any:
    """As ``write_hf_model`` of a Llama.

    Args:
        rope_scaling: Use Llama 3's rule with an original length of 64 tokens.
    """
    return write_hf_model(folder, "llama", rope=LLAMA3_ROPE if rope_scaling else None, **options)


def write_gguf(
    path: Path,
    model: Any,
    tokenizer: tokenizers.Tokenizer | None = None,
    *,
    quantization: str = "F32",
    metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> None:
    """Write a transformers model as llama.cpp's converter does: Llama's q and k rows interleaved, rope factors stored.

    Args:
        tokenizer: The model's; None: the one of ``write_hf_model``.
        quantization: Of the matrices, ``"F32"``, ``"F16"``, ``"BF16"`` or ``"Q8_0"``; vectors are always F32.
        metadata: Further entries (text, whole numbers, booleans), or other values for some.
        extra_tensors: Tensors that the family does not have, by their names in the file.
    """
    tokenizer = tokenizer or train_tokenizer()
    architecture = gguf_architecture(model.config)
    writer = gguf.GGUFWriter(path, architecture)
    entries = _model_metadata(model.config, architecture) | _tokenizer_metadata(tokenizer) | (metadata or {})
    for key, value in entries.items():
        _add(writer, key, value)
    for name, values in (_gguf_tensors(model, architecture) | (extra_tensors or {})).items():
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


write_gguf_llama = write_gguf


def gguf_architecture(config: Any) -> str:
    """What a family is called in GGUF; Mistral goes by Llama's name, because llama.cpp computes both alike."""
    return {"mistral": "llama"}.get(config.model_type, config.model_type)


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


def _model_metadata(config: Any, architecture: str) -> dict[str, Any]:
    head_dim = head_dim_of(config)
    entries: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "rope.dimension_count": head_dim,
    }
    if config.model_type in ("mistral", "phi3", "gemma2"):
        entries["attention.sliding_window"] = config.sliding_window or 0
    if config.model_type == "gemma2":
        entries["attn_logit_softcapping"] = config.attn_logit_softcapping
        entries["final_logit_softcapping"] = config.final_logit_softcapping
        entries["attention.scale"] = config.query_pre_attn_scalar**-0.5
    if config.rope_parameters["rope_type"] == "longrope":
        original = config.original_max_position_embeddings
        growth = config.max_position_embeddings / original
        entries["rope.scaling.original_context_length"] = original
        entries["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(growth) / math.log(original))
    return {f"{architecture}.{key}": value for key, value in entries.items()}


def head_dim_of(config: Any) -> int:
    """Width of a head; Phi-3's configuration does not say it."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


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


def _gguf_tensors(model: Any, architecture: str) -> dict[str, np.ndarray]:
    """Tensors by llama.cpp's names, which the gguf package knows."""
    config, rope = model.config, model.config.rope_parameters
    (kind,) = (kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    tensors = {}
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = interleave(values, config.head_dim)
        if architecture == "gemma2" and name.endswith("norm.weight"):
            values = values + 1
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = np.ascontiguousarray(values)
    if rope["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = rope_factors(config)
    if rope["rope_type"] == "longrope":
        for length in ("long", "short"):
            tensors[f"rope_factors_{length}.weight"] = np.array(rope[f"{length}_factor"], np.float32)
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
