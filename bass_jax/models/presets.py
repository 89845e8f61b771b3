"""Shapes of published models by name, and models with random weights.

Speed and memory do not depend on the values of the weights, so they can be measured without a checkpoint. Acceptance
cannot.
"""

import dataclasses
import functools
import zlib
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bass_jax.models.families import FAMILIES
from bass_jax.models.flax_model import Model, abstract_params, default_output_ids
from bass_jax.models.model_config import ModelConfig
from bass_jax.models.sharding import param_shardings, placed_config
from bass_jax.models.weights import UNIFORM_DEVIATION, draw_int8
from bass_jax.runtime.names import expected_one_of
from bass_jax.typing import Array, Key

_LLAMA = {"model_type": "llama", "vocab_size": 32000, "rms_norm_eps": 1e-5}
_LLAMA3 = _LLAMA | {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
_LLAMA3_FREQUENCIES = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LLAMA3_ROPE = _LLAMA3_FREQUENCIES | {"rope_type": "llama3", "rope_theta": 500000.0}
_SMOLLM2 = _LLAMA | {"num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 1e5}
_MISTRAL = _LLAMA | {"model_type": "mistral", "num_key_value_heads": 8, "max_position_embeddings": 32768}
_OPT = {"model_type": "opt", "vocab_size": 50272}
_CODEGEN = {"model_type": "codegen", "vocab_size": 51200}
_NEOX = {"model_type": "gpt_neox", "vocab_size": 50304}
_QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32768}
_QWEN2 = _QWEN | {"model_type": "qwen2"}
_QWEN3 = _QWEN | {"model_type": "qwen3", "num_key_value_heads": 8, "vocab_size": 151936, "head_dim": 128}
_GEMMA2 = {"model_type": "gemma2", "vocab_size": 256000, "head_dim": 256, "max_position_embeddings": 8192}
_GEMMA3 = {"model_type": "gemma3_text", "vocab_size": 262144, "head_dim": 256, "max_position_embeddings": 32768}
_QWEN3_MOE = _QWEN3 | {"model_type": "qwen3_moe", "num_key_value_heads": 4, "norm_topk_prob": True}
_HYBRID = {"vocab_size": 248320, "rope_theta": 1e7, "max_position_embeddings": 262144}
_DEEPSEEK_V2 = {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 32768,
}
_BASS = {
    "model_type": "gpt_neox",
    "vocab_size": 51200,
    "use_parallel_residual": False,
    "rotary_pct": 1.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}


def _sized(common: Mapping[str, Any], layers: int, width: int, heads: int, mlp: int, **others: Any) -> dict[str, Any]:
    """Adds sizes to a family's common keys, under the key names of that family."""
    names = {
        "opt": ("num_hidden_layers", "hidden_size", "num_attention_heads", "ffn_dim"),
        **dict.fromkeys(("codegen", "gpt2", "gpt_bigcode"), ("n_layer", "n_embd", "n_head", "n_inner")),
    }.get(common["model_type"], ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"))
    return {**common, **dict(zip(names, (layers, width, heads, mlp), strict=True)), **others}


_SOURCES = {
    # The pairs of the BASS paper. It gives the layers, heads and widths of its code drafts, but only the size of their
    # target, so "bass-7.8b" is some shape of that size.
    "opt-13b": _sized(_OPT, 40, 5120, 40, 20480),
    "opt-125m": _sized(_OPT, 12, 768, 12, 3072),
    "opt-350m": _sized(_OPT, 24, 1024, 16, 4096, word_embed_proj_dim=512, do_layer_norm_before=False),
    "codegen-16b": _sized(_CODEGEN, 34, 6144, 24, 24576, rotary_dim=64),
    "codegen-350m": _sized(_CODEGEN, 20, 1024, 16, 4096, rotary_dim=32),
    "bass-7.8b": _sized(_BASS, 38, 4096, 32, 16384),
    "bass-draft-a-310m": _sized(_BASS, 4, 2048, 16, 8192),
    "bass-draft-b-510m": _sized(_BASS, 8, 2048, 16, 8192),
    "bass-draft-c-1b": _sized(_BASS, 4, 4096, 32, 16384),
    # The pairs of the study of speculation and batching.
    "opt-1.3b": _sized(_OPT, 24, 2048, 32, 8192),
    "opt-6.7b": _sized(_OPT, 32, 4096, 32, 16384),
    "llama-7b": _sized(_LLAMA, 32, 4096, 32, 11008, rms_norm_eps=1e-6),
    "llama-160m": _sized(_LLAMA, 12, 768, 12, 3072, rms_norm_eps=1e-6),
    # Others.
    "llama-2-7b": _sized(_LLAMA, 32, 4096, 32, 11008, max_position_embeddings=4096),
    "tinyllama-1.1b": _sized(_LLAMA, 22, 2048, 32, 5632, num_key_value_heads=4),
    "llama-3.1-8b": _sized(_LLAMA3, 32, 4096, 32, 14336, rope_parameters=_LLAMA3_ROPE | {"factor": 8.0}),
    "llama-3.2-1b": _sized(
        _LLAMA3, 16, 2048, 32, 8192, rope_parameters=_LLAMA3_ROPE | {"factor": 32.0}, tie_word_embeddings=True
    ),
    "smollm2-135m": _sized(_SMOLLM2, 30, 576, 9, 1536, tie_word_embeddings=True),
    "mistral-7b": _sized(_MISTRAL, 32, 4096, 32, 14336, sliding_window=4096),
    "qwen2.5-0.5b": _sized(
        _QWEN2, 24, 896, 14, 4864, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True
    ),
    "qwen2.5-7b": _sized(_QWEN2, 28, 3584, 28, 18944, num_key_value_heads=4, vocab_size=152064),
    "qwen3-0.6b": _sized(_QWEN3, 28, 1024, 16, 3072, tie_word_embeddings=True),
    "qwen3-8b": _sized(_QWEN3, 36, 4096, 32, 12288),
    "qwen3-30b-a3b": _sized(_QWEN3_MOE, 48, 2048, 32, 6144, num_experts=128, num_experts_per_tok=8),
    "qwen3-next-80b-a3b": _sized(_HYBRID | {"model_type": "qwen3_next", "vocab_size": 151936}, 48, 2048, 16, 5120),
    "qwen3.5-35b-a3b": _sized(_HYBRID | {"model_type": "qwen3_5_moe_text"}, 40, 2048, 16, 512),
    "deepseek-v2-lite": _sized(_DEEPSEEK_V2, 27, 2048, 16, 10944, moe_intermediate_size=1408, num_experts_per_tok=6),
    "mixtral-8x7b": _sized(_MISTRAL | {"model_type": "mixtral", "rope_theta": 1e6}, 32, 4096, 32, 14336),
    "gemma-2-2b": _sized(_GEMMA2, 26, 2304, 8, 9216, num_key_value_heads=4),
    "gemma-2-9b": _sized(_GEMMA2, 42, 3584, 16, 14336, num_key_value_heads=8),
    "gemma-3-1b": _sized(_GEMMA3, 26, 1152, 4, 6912, num_key_value_heads=1, sliding_window=512),
    "gpt2": _sized({"model_type": "gpt2", "vocab_size": 50257}, 12, 768, 12, 3072),
    "starcoder": _sized({"model_type": "gpt_bigcode", "vocab_size": 49152}, 40, 6144, 48, 24576, n_positions=8192),
    "pythia-160m": _sized(_NEOX, 12, 768, 12, 3072),
    "pythia-6.9b": _sized(_NEOX | {"vocab_size": 50432}, 32, 4096, 32, 16384),
}

PRESETS = tuple(_SOURCES)
"""The names that `preset` accepts."""


def preset(name: str, *, dtype: str = "bfloat16") -> ModelConfig:
    """Returns the configuration of a published model.

    Args:
        name: one of `PRESETS`.
        dtype: of the parameters, activations and cache.

    Raises:
        ValueError: if there is no preset of that name.
    """
    if name not in _SOURCES:
        raise ValueError(f"name={name!r}: {expected_one_of(name, PRESETS)}")
    source = _SOURCES[name]
    return dataclasses.replace(FAMILIES[source["model_type"]].read_config(source), dtype=dtype)


def random_model(
    config: ModelConfig, key: Key[Array, ""], *, mesh: Mesh | None = None, rules: dict[str, str] | None = None
) -> Model:
    """Returns a model with random weights, each generated on its devices in its own dtype.

    Matrices are normal with standard deviation 0.02; norms and biases are initialized as for training. One function is
    compiled per shape, so a model of 40 layers takes seconds, and its own memory and the random bits of one tensor.

    Args:
        config: see `preset`.
        key: a random key.
        mesh: devices to shard the parameters over; the default device by default.
        rules: logical axis → mesh axis; see `bass_jax.models.sharding`.
    """
    boxed = abstract_params(config)
    shardings = None if mesh is None else param_shardings(config, mesh, rules)

    def fill(path, leaf, sharding=None):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        # The name and not the index of the leaf, so that a tensor's values do not depend on which others exist.
        own = jax.random.fold_in(key, zlib.crc32(name.encode()))
        return _generator(_mean_and_deviation(name, config), leaf.value.shape, leaf.value.dtype, sharding)(own)

    def is_leaf(node):
        return isinstance(node, nn.LogicallyPartitioned)

    trees = (boxed,) if shardings is None else (boxed, shardings)
    params = jax.tree_util.tree_map_with_path(fill, *trees, is_leaf=is_leaf)
    return Model(params, placed_config(config, mesh, rules), default_output_ids(config))


def _mean_and_deviation(name: str, config: ModelConfig) -> tuple[float, float]:
    if name.endswith("bias"):
        return 0.0, 0.0
    if name.endswith("gated_delta/norm"):
        return 1.0 - config.recurrences[0].norm.offset, 0.0
    if name.endswith("norm"):
        return 1.0 - config.layers[0].norm.offset, 0.0
    if name.endswith("_scale"):
        return 0.02 / UNIFORM_DEVIATION, 0.0
    return 0.0, 0.02


@functools.cache
def _generator(mean_and_deviation: tuple[float, float], shape: tuple[int, ...], dtype: Any, sharding: Any):
    mean, deviation = mean_and_deviation

    def generate(key):
        if deviation == 0:
            return jnp.full(shape, mean, dtype)
        if dtype == jnp.int8:
            return draw_int8(key, shape, dtype)
        return deviation * jax.random.normal(key, shape, dtype) + mean

    return jax.jit(generate, out_shardings=sharding)
