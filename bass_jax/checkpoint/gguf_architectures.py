"""The architectures of GGUF files in Hugging Face's terms: tensor names, configuration keys, layout of tensors."""

import dataclasses
import functools
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
_MOE_NAMES = _LLAMA_NAMES | _table("""
    ffn_gate_inp=mlp.gate ffn_gate_exps=mlp.experts.{}.gate_proj ffn_up_exps=mlp.experts.{}.up_proj
    ffn_down_exps=mlp.experts.{}.down_proj ffn_gate_shexp=mlp.shared_expert.gate_proj
    ffn_up_shexp=mlp.shared_expert.up_proj ffn_down_shexp=mlp.shared_expert.down_proj
    ffn_gate_inp_shexp=mlp.shared_expert_gate
""")
_PHI3_NAMES = _LLAMA_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
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
            the tensor stacks all experts of a layer.
        keys: Hugging Face key → key of a positive integer in the metadata.
        finish: function of the metadata and of the values read by `keys`; returns the whole configuration.
        restore: function of a Hugging Face name, a stored tensor and the configuration; returns the tensor in Hugging
            Face's layout.
    """

    family: str
    layers: str
    names: Mapping[str, str]
    keys: Mapping[str, str]
    finish: Callable[["Metadata", Config], Config]
    restore: Callable[[str, np.ndarray, Config], np.ndarray]

    def name_of(self, stored: str) -> str:
        """Returns the Hugging Face name of a stored tensor; an unknown name is returned as it is."""
        stem, _, suffix = stored.rpartition(".")
        layer, part = "", stem
        if stem.startswith("blk."):
            _, number, part = stem.split(".", 2) if stem.count(".") > 1 else ("", "", stem)
            layer = f"{self.layers}.{number}."
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
        if meta.value("rope.scaling.attn_factor", 1.0) != 1.0:
            raise ValueError(f"rope.scaling.attn_factor={meta.value('rope.scaling.attn_factor')!r}: expected 1")
        config["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": meta.number("rope.scaling.factor", 1.0),
            "original_max_position_embeddings": meta.value(
                "rope.scaling.original_context_length", config["max_position_embeddings"]
            ),
        }
    return config


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
    rotated = meta.value("rope.dimension_count", config["head_dim"])
    return config | {
        "sliding_window": meta.value("attention.sliding_window", None),
        "partial_rotary_factor": rotated / config["head_dim"],
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


def _input_first(name: str, array: np.ndarray, config: Config) -> np.ndarray:
    """Transposes GPT-2's matrices, which Hugging Face stores as ``[in, out]``."""
    is_matrix = array.ndim == 2 and name.split(".")[-2] in ("c_attn", "c_proj", "c_fc")
    return array.T if is_matrix else array


def _llama_like(family: str, restore, names=_LLAMA_NAMES, finish=_llama) -> Architecture:
    return Architecture(family, "model.layers", names, _LLAMA_KEYS, finish, restore)


ARCHITECTURES = {
    "llama": _llama_like("llama", _half_split_rotary),
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
}
"""By ``general.architecture``."""
