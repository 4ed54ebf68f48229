"""Tensor names and shapes: ours are Hugging Face's for Llama; GGUF's are translated to them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...errors import ModelFileError
from ..models.config import ModelConfig

__all__ = ["ROPE_FREQS", "check_tensors", "expected_shapes", "from_gguf_name"]

ROPE_FREQS = "rope_freqs"

_GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": ROPE_FREQS,
}
_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def from_gguf_name(name: str) -> str | None:
    """Our name of a GGUF tensor, or None for one that a Llama model does not have."""
    match = _GGUF_LAYER.fullmatch(name)
    if match is None:
        return _GGUF_NAMES.get(name)
    part = _GGUF_LAYER_NAMES.get(match[2])
    return part and f"model.layers.{int(match[1])}.{part}.weight"


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the model, by our name; matrices are ``[out, in]``."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (q_rows, hidden),
            prefix + "self_attn.k_proj.weight": (kv_rows, hidden),
            prefix + "self_attn.v_proj.weight": (kv_rows, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, q_rows),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (intermediate, hidden),
            prefix + "mlp.up_proj.weight": (intermediate, hidden),
            prefix + "mlp.down_proj.weight": (hidden, intermediate),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    if config.has_rope_freqs:
        shapes[ROPE_FREQS] = (config.head_dim // 2,)
    return shapes


def check_tensors(path: Path, found: Mapping[str, tuple[int, ...]], config: ModelConfig, extra: Iterable[str]) -> None:
    """Check names and shapes of a model's tensors against its configuration.

    Args:
        path: Named in errors.
        found: Shapes by our names.
        config: What is expected.
        extra: Names in the file that mean nothing to us, as the file has them.

    Raises:
        ModelFileError: Naming missing or unexpected tensors, or one with its found and its expected shape.
    """
    if config.num_layers > len(found):
        # Said before a damaged count makes us list the tensors of a billion layers.
        raise ModelFileError(f"{path}: {len(found)} known tensors are too few for {config.num_layers} layers")
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelFileError(f"{path}: missing tensors: {_some(missing)}")
    unexpected = [*extra, *(name for name in found if name not in expected)]
    if unexpected:
        raise ModelFileError(f"{path}: tensors that a {config.architecture} model does not have: {_some(unexpected)}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelFileError(
                f"{path}: tensor {name} has shape {list(found[name])}; the configuration implies {list(shape)}"
            )


def _some(names: list[str], limit: int = 5) -> str:
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")
