"""The architectures of GGUF files in Hugging Face's terms: tensor names, configuration keys, layout of tensors."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def _table(text: str) -> dict[str, str]:
    """Returns a dict of pairs that are written as ``key=value``."""
    return dict(pair.split("=") for pair in text.split())


_LLAMA_NAMES = _table("""
    token_embd=model.embed_tokens output_norm=model.norm output=lm_head attn_norm=input_layernorm
    ffn_norm=post_attention_layernorm attn_q=self_attn.q_proj attn_k=self_attn.k_proj attn_v=self_attn.v_proj
    attn_q_norm=self_attn.q_norm attn_k_norm=self_attn.k_norm attn_output=self_attn.o_proj ffn_gate=mlp.gate_proj
    ffn_up=mlp.up_proj ffn_down=mlp.down_proj
""")
_SANDWICH_NAMES = _LLAMA_NAMES | _table("""
    ffn_norm=pre_feedforward_layernorm post_attention_norm=post_attention_layernorm
    post_ffw_norm=post_feedforward_layernorm
""")
_MIXTRAL_NAMES = _LLAMA_NAMES | _table("""
    ffn_gate_inp=block_sparse_moe.gate ffn_gate_exps=block_sparse_moe.experts.{}.w1
    ffn_up_exps=block_sparse_moe.experts.{}.w3 ffn_down_exps=block_sparse_moe.experts.{}.w2
""")
_GPT_OSS_NAMES = _LLAMA_NAMES | _table("""
    post_attention_norm=post_attention_layernorm attn_sinks.weight=self_attn.sinks ffn_gate_inp=mlp.router
    ffn_gate_exps=mlp.experts.gate_proj ffn_up_exps=mlp.experts.up_proj ffn_down_exps=mlp.experts.down_proj
    ffn_down_exps.bias=mlp.experts.down_proj_bias
""")
_MOE_NAMES = _LLAMA_NAMES | _table("""
    ffn_gate_inp=mlp.gate ffn_gate_exps=mlp.experts.{}.gate_proj ffn_up_exps=mlp.experts.{}.up_proj
    ffn_down_exps=mlp.experts.{}.down_proj ffn_gate_shexp=mlp.shared_expert.gate_proj
    ffn_up_shexp=mlp.shared_expert.up_proj ffn_down_shexp=mlp.shared_expert.down_proj
    ffn_gate_inp_shexp=mlp.shared_expert_gate
""")
_PHI3_NAMES = _LLAMA_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GLM4_NAMES = _LLAMA_NAMES | _table("""
    post_attention_norm=post_self_attn_layernorm post_ffw_norm=post_mlp_layernorm ffn_up=mlp.gate_up_proj
""")
_STARCODER2_NAMES = _LLAMA_NAMES | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_NEOX_NAMES = _table("""
    token_embd=gpt_neox.embed_in output_norm=gpt_neox.final_layer_norm output=embed_out attn_norm=input_layernorm
    attn_qkv=attention.query_key_value attn_output=attention.dense ffn_norm=post_attention_layernorm
    ffn_up=mlp.dense_h_to_4h ffn_down=mlp.dense_4h_to_h
""")
_GPT2_NAMES = _table("""
    token_embd=transformer.wte position_embd=transformer.wpe output_norm=transformer.ln_f output=lm_head
    attn_norm=ln_1 attn_qkv=attn.c_attn attn_output=attn.c_proj ffn_norm=ln_2 ffn_up=mlp.c_fc ffn_down=mlp.c_proj
""")

_LLAMA_KEYS = _table("""
    hidden_size=embedding_length num_hidden_layers=block_count num_attention_heads=attention.head_count
    intermediate_size=feed_forward_length max_position_embeddings=context_length
""")
_GPT2_KEYS = _table("""
    n_embd=embedding_length n_layer=block_count n_head=attention.head_count n_inner=feed_forward_length
    n_positions=context_length
""")

Config = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One value of ``general.architecture``.

    Attributes:
        family: the corresponding ``model_type``.
        layers: what Hugging Face writes before the number of a layer.
        names: part of a tensor name in GGUF → part of its Hugging Face name, with ``{}`` for the index of an expert if
            the tensor stacks all experts of a layer. A part that ends with ``.weight`` or ``.bias`` stands for the
            rest of the name.
        keys: Hugging Face key → key of a positive integer in the metadata.
        finish: function of the metadata and of the values read by `keys`; returns the whole configuration.
        restore: function of a Hugging Face name, a stored tensor and the configuration; returns the tensor in Hugging
            Face's layout.
        others: further families, which `finish` chooses by the metadata.
    """

    family: str
    layers: str
    names: Mapping[str, str]
    keys: Mapping[str, str]
    finish: Callable[["Metadata", Config], Config]
    restore: Callable[[str, np.ndarray, Config], np.ndarray]
    others: tuple[str, ...] = ()

    def name_of(self, stored: str) -> str:
        """Returns the Hugging Face name of a stored tensor; an unknown name is returned as it is."""
        stem, _, suffix = stored.rpartition(".")
        layer, part = "", stem
        if stem.startswith("blk."):
            _, number, part = stem.split(".", 2) if stem.count(".") > 1 else ("", "", stem)
            layer = f"{self.layers}.{number}."
        if f"{part}.{suffix}" in self.names:
            return layer + self.names[f"{part}.{suffix}"]
        return f"{layer}{self.names[part]}.{suffix}" if part in self.names else stored


@dataclasses.dataclass(frozen=True)
class Metadata:
    """Values of the metadata whose keys have the architecture's prefix.

    Attributes:
        value: function of a name and a default; returns the value.
        number: as `value`, for a number that is stored as float32, rounded so that 1e-5 is read as 1e-5.
        tensors: Hugging Face names of all tensors.
    """

    value: Callable[..., Any]
    number: Callable[..., float]
    tensors: frozenset[str]


def _llama(meta: Metadata, config: Config) -> Config:
    heads = config["num_attention_heads"]
    config = config | {
        "num_key_value_heads": meta.value("attention.head_count_kv", heads),
        "head_dim": meta.value("attention.key_length", config["hidden_size"] // heads),
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon", 1e-6),
        "tie_word_embeddings": "lm_head.weight" not in meta.tensors,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in meta.tensors,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in meta.tensors,
    }
    kind = meta.value("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"rope.scaling.type={kind!r}: expected 'none', 'linear' or 'yarn'")
    if kind == "linear":
        config["rope_scaling"] = {"rope_type": "linear", "factor": meta.number("rope.scaling.factor", 1.0)}
    if kind == "yarn":
        factor = meta.number("rope.scaling.factor", 1.0)
        usual = 0.1 * math.log(max(factor, 1.0)) + 1.0  # What YaRN multiplies queries and keys by.
        for name in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
            found = meta.number(name, 1.0)
            if found != 1.0 and not math.isclose(found, usual, rel_tol=1e-4):
                raise ValueError(f"{name}={found!r}: expected 1 or {usual:.4f}")
        config["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": meta.value(
                "rope.scaling.original_context_length", config["max_position_embeddings"]
            ),
            "beta_fast": meta.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": meta.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    return config


def _llama_or_mixtral(meta: Metadata, config: Config) -> Config:
    config = _llama(meta, config)
    if not meta.value("expert_count"):
        return config
    experts = {"num_local_experts": meta.value("expert_count"), "num_experts_per_tok": meta.value("expert_used_count")}
    return config | {"model_type": "mixtral"} | experts


def _olmo2(meta: Metadata, config: Config) -> Config:
    """Reads OLMo 2, or OLMo 3 if there are windows."""
    config = _llama(meta, config)
    is_windowed = meta.value("attention.sliding_window_pattern")
    if is_windowed is None:
        return config
    if not isinstance(is_windowed, list):
        raise ValueError(f"attention.sliding_window_pattern={is_windowed!r}: expected a boolean per layer")
    local = {"rope_theta": meta.number("rope.freq_base_swa", config["rope_theta"])}
    return config | {
        "model_type": "olmo3",
        "sliding_window": meta.value("attention.sliding_window"),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in is_windowed],
        "rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": local},
    }


def _smollm3(meta: Metadata, config: Config) -> Config:
    return _llama(meta, config) | {"no_rope_layer_interval": 4}  # Not in the metadata.


def _granite(meta: Metadata, config: Config) -> Config:
    config = _llama(meta, config)
    return config | {
        "attention_multiplier": meta.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": meta.number("embedding_scale", 1.0),
        "residual_multiplier": meta.number("residual_scale", 1.0),
        "logits_scaling": meta.number("logit_scale", 1.0),
    }


def _glm4(meta: Metadata, config: Config) -> Config:
    if (sections := meta.value("rope.dimension_sections")) is not None:
        raise ValueError(f"rope.dimension_sections={sections!r}: expected none, as in a model without vision")
    config = _llama(meta, config)
    return config | {"partial_rotary_factor": _rotated_share(meta, config["head_dim"])}


def _starcoder2(meta: Metadata, config: Config) -> Config:
    config = _llama(meta, config)
    # The metadata do not have the window of the model, which llama.cpp and `transformers` leave out too.
    epsilon = meta.number("attention.layer_norm_epsilon", 1e-5)
    return config | {"norm_epsilon": epsilon, "use_bias": config["attention_bias"]}


def _cohere(meta: Metadata, config: Config) -> Config:
    return _llama(meta, config) | {
        "layer_norm_eps": meta.number("attention.layer_norm_epsilon", 1e-5),
        "logit_scale": meta.number("logit_scale", 1.0),
        "use_qk_norm": "model.layers.0.self_attn.q_norm.weight" in meta.tensors,
        "sliding_window": meta.value("attention.sliding_window", None),
        "sliding_window_pattern": 4,  # Not in the metadata.
    }


def _gpt_oss(meta: Metadata, config: Config) -> Config:
    config = _llama(meta, config)
    if config.get("rope_scaling", {}).get("rope_type") == "yarn":
        config["rope_scaling"]["truncate"] = False  # Not in the metadata.
    return config | {
        "intermediate_size": meta.value("expert_feed_forward_length", config["intermediate_size"]),
        "num_local_experts": meta.value("expert_count"),
        "num_experts_per_tok": meta.value("expert_used_count"),
        "sliding_window": meta.value("attention.sliding_window", 128),
    }


def _neox(meta: Metadata, config: Config) -> Config:
    return config | {
        "rotary_pct": _rotated_share(meta, _width_per_head(config)),
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "use_parallel_residual": meta.value("use_parallel_residual", True),
        "layer_norm_eps": meta.number("attention.layer_norm_epsilon", 1e-5),
        "attention_bias": "gpt_neox.layers.0.attention.query_key_value.bias" in meta.tensors,
        "tie_word_embeddings": "embed_out.weight" not in meta.tensors,
    }


def _rotated_share(meta: Metadata, head_dim: int) -> float:
    return meta.number("rope.dimension_count", head_dim) / head_dim


def _gemma2(meta: Metadata, config: Config) -> Config:
    config = _llama(meta, config)
    # The metadata do not say it: only the 27B model scales by the width.
    is_27b = config["num_hidden_layers"] == 46
    return config | {
        "query_pre_attn_scalar": _width_per_head(config) if is_27b else config["head_dim"],
        "sliding_window": meta.value("attention.sliding_window", 4096),
        "attn_logit_softcapping": meta.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.number("final_logit_softcapping", 30.0),
    }


def _gemma3(meta: Metadata, config: Config) -> Config:
    config = _llama(meta, config)
    is_27b = config["num_hidden_layers"] == 62
    return config | {
        "rope_theta": meta.number("rope.freq_base", 1e6),
        "query_pre_attn_scalar": _width_per_head(config) if is_27b else config["head_dim"],
        "sliding_window": meta.value("attention.sliding_window", 4096),
    }


def _moe(meta: Metadata, config: Config, *, is_normalized: bool) -> Config:
    config = _llama(meta, config)
    return config | {
        "num_experts": meta.value("expert_count"),
        "num_experts_per_tok": meta.value("expert_used_count"),
        "moe_intermediate_size": meta.value("expert_feed_forward_length"),
        "shared_expert_intermediate_size": meta.value("expert_shared_feed_forward_length"),
        "norm_topk_prob": is_normalized,  # Not in the metadata: it follows from the architecture.
        "qkv_bias": config["attention_bias"],
    }


def _phi3(meta: Metadata, config: Config) -> Config:
    config = _llama(meta, config)
    return config | {
        "sliding_window": meta.value("attention.sliding_window", None),
        "partial_rotary_factor": _rotated_share(meta, config["head_dim"]),
        "pad_token_id": None,
    }


def _width_per_head(config: Config) -> int:
    return config["hidden_size"] // config["num_attention_heads"]


def _gpt2(meta: Metadata, config: Config) -> Config:
    return config | {
        "layer_norm_epsilon": meta.number("attention.layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": "lm_head.weight" not in meta.tensors,
    }


def _as_stored(name: str, array: np.ndarray, config: Config) -> np.ndarray:
    return array


def _half_split_rotary(name: str, array: np.ndarray, config: Config) -> np.ndarray:
    """Reorders Llama's queries and keys, ``[out, in]``, from interleaved rotary pairs to half-split ones."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return array
    count = config[heads]
    if not isinstance(count, int) or count < 1 or array.ndim < 1 or array.shape[0] % (2 * count):
        raise ValueError(f"{list(array.shape)}: {count} heads")
    pairs = array.reshape(count, array.shape[0] // count // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _without_offset(name: str, array: np.ndarray, config: Config) -> np.ndarray:
    """Subtracts the offset of 1 that is added to Gemma's norms."""
    return array - np.float32(1) if name.endswith("norm.weight") else array


def _shared_gate_as_matrix(name: str, array: np.ndarray, config: Config) -> np.ndarray:
    """Returns the gate of the shared MLP as a matrix of one row, which GGUF stores as a vector."""
    return array[None] if name.endswith("shared_expert_gate.weight") and array.ndim == 1 else array


def _queries_keys_values_per_head(name: str, array: np.ndarray, config: Config) -> np.ndarray:
    """Returns GPT-NeoX's fused projection by heads, which GGUF stores as all queries, all keys and all values."""
    heads = config["num_attention_heads"]
    if not name.endswith(("query_key_value.weight", "query_key_value.bias")) or array.shape[0] % (3 * heads):
        return array
    return array.reshape(3, heads, -1, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)


def _input_first(name: str, array: np.ndarray, config: Config) -> np.ndarray:
    """Transposes GPT-2's matrices, which Hugging Face stores as ``[in, out]``."""
    is_matrix = array.ndim == 2 and name.split(".")[-2] in ("c_attn", "c_proj", "c_fc")
    return array.T if is_matrix else array


def _llama_like(family: str, restore, names=_LLAMA_NAMES, finish=_llama, others=()) -> Architecture:
    return Architecture(family, "model.layers", names, _LLAMA_KEYS, finish, restore, others)


ARCHITECTURES = {
    "llama": _llama_like("llama", _half_split_rotary, _MIXTRAL_NAMES, _llama_or_mixtral, ("mixtral",)),
    "qwen2": _llama_like("qwen2", _as_stored),
    "qwen3": _llama_like("qwen3", _as_stored),
    "gemma": _llama_like("gemma", _without_offset),
    "gemma2": _llama_like("gemma2", _without_offset, _SANDWICH_NAMES, _gemma2),
    "gemma3": _llama_like("gemma3_text", _without_offset, _SANDWICH_NAMES, _gemma3),
    "qwen2moe": _llama_like(
        "qwen2_moe", _shared_gate_as_matrix, _MOE_NAMES, functools.partial(_moe, is_normalized=False)
    ),
    "qwen3moe": _llama_like("qwen3_moe", _as_stored, _MOE_NAMES, functools.partial(_moe, is_normalized=True)),
    "phi3": _llama_like("phi3", _as_stored, _PHI3_NAMES, _phi3),
    "gpt2": Architecture("gpt2", "transformer.h", _GPT2_NAMES, _GPT2_KEYS, _gpt2, _input_first),
    "starcoder": Architecture("gpt_bigcode", "transformer.h", _GPT2_NAMES, _GPT2_KEYS, _gpt2, _as_stored),
    "olmo2": _llama_like("olmo2", _as_stored, _SANDWICH_NAMES, _olmo2, ("olmo3",)),
    "olmoe": _llama_like("olmoe", _as_stored, _MOE_NAMES, functools.partial(_moe, is_normalized=False)),
    "smollm3": _llama_like("smollm3", _half_split_rotary, finish=_smollm3),
    "granite": _llama_like("granite", _half_split_rotary, finish=_granite),
    "glm4": _llama_like("glm4", _as_stored, _GLM4_NAMES, _glm4),
    "starcoder2": _llama_like("starcoder2", _as_stored, _STARCODER2_NAMES, _starcoder2),
    "command-r": _llama_like("cohere", _as_stored, finish=_cohere),
    "cohere2": _llama_like("cohere2", _as_stored, finish=_cohere),
    "gpt-oss": _llama_like("gpt_oss", _as_stored, _GPT_OSS_NAMES, _gpt_oss),
    "gptneox": Architecture(
        "gpt_neox", "gpt_neox.layers", _NEOX_NAMES, _LLAMA_KEYS, _neox, _queries_keys_values_per_head
    ),
}
"""By ``general.architecture``."""

LEFT_OUT = {
    "chatglm": "converters write constants for the context and the epsilon of the norms, and files have two layouts",
    "deepseek2": "files have two layouts of the projections of keys and values, and older ones lack groups of experts",
    "falcon": "the metadata lack the rotary base, and the names of the norms depend on their number",
    "llama4": "the metadata lack the chunks of the attention and the norm of the queries and keys",
    **dict.fromkeys(
        ("qwen3next", "qwen35", "qwen35moe"),
        "files hold the decays of the recurrent layers in another form, and their heads in another order",
    ),
}
"""Why files of an architecture are refused whose family is read from other files."""
