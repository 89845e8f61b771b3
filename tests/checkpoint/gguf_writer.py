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
    "gpt_bigcode": gguf.MODEL_ARCH.STARCODER,
    "gpt_neox": gguf.MODEL_ARCH.GPTNEOX,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
    "cohere": gguf.MODEL_ARCH.COMMAND_R,
    "cohere2": gguf.MODEL_ARCH.COHERE2,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
}
_PERMUTED = ("llama", "mixtral", "smollm3", "granite")
"""Families whose queries and keys have interleaved rotary pairs in GGUF and half-split ones in Hugging Face."""


def write_gguf(
    path: Path,
    model: Model,
    *,
    kind: str = "F32",
    architecture: str | None = None,
    tokens: list[str] | None = None,
    extra: dict[str, float | list[int]] | None = None,
) -> None:
    """Writes a model whose matrices have the GGUF type `kind`, and `extra` metadata of the architecture."""
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
    (writer.add_layer_norm_eps if layer.norm.kind == "layer" else writer.add_layer_norm_rms_eps)(layer.norm.eps)
    if not config.has_learned_positions:
        _write_rotary(writer, config)
    if isinstance(layer.mlp, MoEConfig):
        writer.add_expert_count(layer.mlp.num_experts)
        writer.add_expert_used_count(layer.mlp.num_active)
        writer.add_expert_feed_forward_length(layer.mlp.width)
        if layer.mlp.shared is not None:
            writer.add_expert_shared_feed_forward_length(layer.mlp.shared.width)
    if attention.window is not None and config.family != "starcoder2":
        writer.add_sliding_window(attention.window)
    if config.family == "olmo3":
        writer.add_sliding_window_pattern([layer.attention.window is not None for layer in config.layers])
    if config.family == "granite":
        writer.add_attention_scale(attention.scale)
        writer.add_embedding_scale(config.embedding_scale)
        writer.add_residual_scale(layer.residual_scale)
        writer.add_logit_scale(1.0 / config.logit_scale)
    if config.family in ("cohere", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
    if config.family == "gpt_neox":
        writer.add_parallel_residual(layer.block == "parallel")
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
    for key, value in (extra or {}).items():
        add = writer.add_array if isinstance(value, list) else writer.add_float32
        add(f"{writer.arch}.{key}", value)
    kind = gguf.GGMLQuantizationType[kind]
    names = gguf.get_tensor_name_map(arch, config.num_layers)
    with_experts = separate_projections if config.family == "gpt_oss" else stacked_experts
    for name, tensor in with_experts(hugging_face_tensors(model)).items():
        stem, suffix = name.rsplit(".", 1)
        if config.family in _PERMUTED and stem.endswith(("q_proj", "k_proj")):
            tensor = interleave(tensor, attention.num_heads if stem.endswith("q_proj") else attention.num_kv_heads)
        if config.family.startswith("gemma") and stem.endswith("norm"):
            tensor = tensor + 1
        if config.family == "gpt2" and tensor.ndim == 2 and ".h." in stem:
            tensor = np.ascontiguousarray(tensor.T)
        if config.family == "gpt_neox" and stem.endswith("query_key_value"):
            heads = tensor.reshape(attention.num_heads, 3, attention.head_dim, *tensor.shape[1:])
            tensor = np.ascontiguousarray(np.moveaxis(heads, 1, 0).reshape(tensor.shape))
        if stem.endswith("shared_expert_gate"):
            tensor = tensor[0]
        gguf_name = f"{names.get_name(stem)}.{suffix}"
        assert not gguf_name.startswith("None"), stem
        if tensor.ndim == 1 or suffix == "bias" or stem.endswith("norm"):
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


def separate_projections(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns gpt-oss's tensors with the gate and the other projection apart, and matrices ``[experts, out, in]``."""
    found = {}
    for name, tensor in tensors.items():
        stem, kind = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
        if stem.endswith("experts.gate_up_proj"):
            for i, part in enumerate(("gate_proj", "up_proj")):
                rows = np.moveaxis(tensor[..., i::2], -1, 1)  # [experts, out], or [experts, out, in]
                found[f"{stem.replace('gate_up_proj', part)}.{kind}"] = np.ascontiguousarray(rows)
        elif stem.endswith("experts.down_proj"):
            found[f"{stem}.{kind}"] = np.ascontiguousarray(np.moveaxis(tensor, -1, 1))
        else:
            found[f"{name}.weight" if name.endswith("sinks") else name] = tensor
    return found


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_rotary(writer: gguf.GGUFWriter, config) -> None:
    # The last layer of Gemma 3 and OLMo 3 uses the global rotary base, the last layer of others may have none.
    attention = next(layer.attention for layer in reversed(config.layers) if layer.attention.rope is not None)
    rope = attention.rope
    writer.add_head_count_kv(attention.num_kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_rope_freq_base(rope.base)
    if config.family == "olmo3":
        writer.add_rope_freq_base_swa(config.layers[0].attention.rope.base)
    if rope.rotary_dim is not None:
        writer.add_rope_dimension_count(rope.rotary_dim)
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
        writer.add_rope_scaling_yarn_beta_fast(scaling.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(scaling.beta_slow)


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
