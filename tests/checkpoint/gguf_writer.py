"""Writes small GGUF files with the tensor names, rotary order and norm offsets of llama.cpp's converter."""

import re
from pathlib import Path

import gguf
import numpy as np
from flax.traverse_util import flatten_dict

from bass_jax.models import Model, MoEConfig, rotary
from bass_jax.models.families import FAMILIES

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "gpt2": gguf.MODEL_ARCH.GPT2,
}


def write_gguf(
    path: Path, model: Model, *, kind: str = "F32", architecture: str | None = None, tokens: list[str] | None = None
) -> None:
    """Writes a model whose matrices have the GGUF type `kind`."""
    config = model.config
    arch = ARCHITECTURES[config.family]
    layer = config.layers[0]
    attention = layer.attention
    writer = gguf.GGUFWriter(path, architecture or gguf.MODEL_ARCH_NAMES[arch])
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(layer.mlp.width)
    writer.add_head_count(attention.num_heads)
    if config.family == "gpt2":
        writer.add_layer_norm_eps(layer.norm.eps)
    else:
        _write_rotary(writer, config)
    if isinstance(layer.mlp, MoEConfig):
        writer.add_expert_count(layer.mlp.num_experts)
        writer.add_expert_used_count(layer.mlp.num_active)
        writer.add_expert_feed_forward_length(layer.mlp.width)
        if layer.mlp.shared is not None:
            writer.add_expert_shared_feed_forward_length(layer.mlp.shared.width)
    if attention.window is not None:
        writer.add_sliding_window(attention.window)
    if config.family == "gemma2":
        writer.add_attn_logit_softcapping(attention.softcap)
        writer.add_final_logit_softcapping(config.logit_softcap)
    if tokens is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
        writer.add_token_merges(["t h"])
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(2)
    kind = gguf.GGMLQuantizationType[kind]
    names = gguf.get_tensor_name_map(arch, config.num_layers)
    for name, tensor in stacked_experts(hugging_face_tensors(model)).items():
        stem, suffix = name.rsplit(".", 1)
        if config.family == "llama" and stem.endswith(("q_proj", "k_proj")):
            tensor = interleave(tensor, attention.num_heads if stem.endswith("q_proj") else attention.num_kv_heads)
        if config.family.startswith("gemma") and stem.endswith("norm"):
            tensor = tensor + 1
        if config.family == "gpt2" and tensor.ndim == 2 and ".h." in stem:
            tensor = np.ascontiguousarray(tensor.T)
        if stem.endswith("shared_expert_gate"):
            tensor = tensor[0]
        gguf_name = f"{names.get_name(stem)}.{suffix}"
        if tensor.ndim == 1:
            writer.add_tensor(gguf_name, tensor)
        else:
            writer.add_tensor(gguf_name, gguf.quantize(tensor, kind), raw_dtype=kind)
    finish(writer)


def stacked_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors with those of all experts of a layer as one, whose name has no index."""
    found: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors.items():
        found.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), []).append(tensor)
    return {name: np.stack(parts) if ".experts." in name else parts[0] for name, parts in found.items()}


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_rotary(writer: gguf.GGUFWriter, config) -> None:
    layer = config.layers[-1]  # The last layer of Gemma 3 uses the global rotary base.
    attention, rope = layer.attention, layer.attention.rope
    writer.add_head_count_kv(attention.num_kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_layer_norm_rms_eps(layer.norm.eps)
    writer.add_rope_freq_base(rope.base)
    scaling = rope.scaling
    if scaling is None:
        return
    if scaling.kind == "llama3":
        plain = rope.base ** -(np.arange(0, attention.head_dim, 2) / attention.head_dim)
        divisors = plain / rotary.frequencies(rope, attention.head_dim, context=0)
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType(scaling.kind))
    writer.add_rope_scaling_factor(scaling.factor)
    if scaling.kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling.original_context)


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows of every head so that dimensions i and i + H/2 are adjacent."""
    rows = weight.reshape(heads, weight.shape[0] // heads, -1)
    half = rows.shape[1] // 2
    order = [lane for pair in zip(range(half), range(half, 2 * half), strict=True) for lane in pair]
    return np.ascontiguousarray(rows[:, order].reshape(weight.shape))


def hugging_face_tensors(model: Model) -> dict[str, np.ndarray]:
    """Returns the tensors of a model in float32, by their names in Hugging Face."""
    params, tensors = flatten_dict(model.params, sep="/"), {}
    for path, rule in FAMILIES[model.config.family].rules(model.config).items():
        parts = rule.split(np.asarray(params[path]))
        for name, part in zip(rule.sources, parts, strict=True):
            tensors[name] = np.ascontiguousarray(part, np.float32)
    return tensors
