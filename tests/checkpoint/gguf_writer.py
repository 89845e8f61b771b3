"""Writes small GGUF files, in llama.cpp's order of rotary lanes."""

from pathlib import Path

import gguf
import numpy as np

from bass_jax.checkpoint.trees import flatten
from bass_jax.models import Model
from bass_jax.models.families import FAMILIES

_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(
    path: Path, model: Model, *, kind: str = "F32", architecture: str = "llama", tokens: list[str] | None = None
) -> None:
    """Writes `model` with its matrices quantised as `kind`."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_base)
    if tokens is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
        writer.add_token_merges(["t h"])
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(2)
    kind = gguf.GGMLQuantizationType[kind]
    for name, tensor in hugging_face_tensors(model).items():
        stem, suffix = name.rsplit(".", 1)
        layer = ""
        if stem.startswith("model.layers."):
            _, _, index, stem = stem.split(".", 3)
            layer = f"blk.{index}."
        heads = {"self_attn.q_proj": config.num_heads, "self_attn.k_proj": config.num_kv_heads}.get(stem)
        if heads is not None:
            tensor = interleave(tensor, heads)
        if tensor.ndim == 1:
            writer.add_tensor(f"{layer}{_NAMES[stem]}.{suffix}", tensor)
        else:
            data = gguf.quantize(tensor, kind)
            writer.add_tensor(f"{layer}{_NAMES[stem]}.{suffix}", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Lane i and lane i + H/2 of a head become neighbours."""
    rows = weight.reshape(heads, weight.shape[0] // heads, -1)
    half = rows.shape[1] // 2
    order = [lane for pair in zip(range(half), range(half, 2 * half), strict=True) for lane in pair]
    return np.ascontiguousarray(rows[:, order].reshape(weight.shape))


def hugging_face_tensors(model: Model) -> dict[str, np.ndarray]:
    """The model's tensors under Hugging Face's names, float32."""
    params, tensors = flatten(model.params), {}
    for path, rule in FAMILIES[model.config.family].rules(model.config).items():
        parts = rule.split(np.asarray(params[path]))
        for name, part in zip(rule.sources, parts, strict=True):
            tensors[name] = np.ascontiguousarray(part, np.float32)
    return tensors
