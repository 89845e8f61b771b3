"""CodeGen: parallel attention and MLP with one norm, partly rotated heads, and a special layout of the projection."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bass_jax.models.families import base, tensor_names
from bass_jax.models.families.base import Family, Rule
from bass_jax.models.families.gpt2 import ALIASES
from bass_jax.models.model_config import AttentionConfig, DenseMLP, LayerConfig, ModelConfig, NormConfig, RopeConfig

_NUM_BLOCKS = 4
"""The fused projection is stored in four blocks, which were made for four devices."""


def read_config(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    base.check_aliases(source, ALIASES)
    width, num_heads = base.read_integer(source, "n_embd"), base.read_integer(source, "n_head")
    if num_heads % _NUM_BLOCKS:
        raise ValueError(f"config.json: n_head={num_heads}: expected a multiple of {_NUM_BLOCKS}")
    norm = NormConfig("layer", base.read_number(source, "layer_norm_epsilon", 1e-5))
    rope = RopeConfig(rotary_dim=base.read_integer(source, "rotary_dim", 64))
    mlp = DenseMLP(
        width=base.read_integer(source, "n_inner", 4 * width, is_nullable=True),
        activation=base.read_activation(source, "activation_function", "gelu_new"),
        is_gated=False,
        has_bias=True,
    )
    attention = AttentionConfig(num_heads, num_heads, width // max(num_heads, 1), rope)
    return ModelConfig(
        family="codegen",
        vocab_size=base.read_integer(source, "vocab_size"),
        width=width,
        context=base.read_integer(source, "n_positions", 2048),
        layers=(LayerConfig(attention, mlp, norm, "parallel"),) * base.read_num_layers(source, "n_layer"),
        final_norm=norm,
        is_tied=base.read_flag(source, "tie_word_embeddings", False),
        has_head_bias=True,
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    layer = config.layers[0]
    assert layer.attention.rope is not None
    return {
        "architectures": ["CodeGenForCausalLM"],
        "model_type": "codegen",
        "vocab_size": config.vocab_size,
        "n_embd": config.width,
        "n_head": layer.attention.num_heads,
        "n_layer": config.num_layers,
        "n_inner": layer.mlp.width,
        "n_positions": config.context,
        "n_ctx": config.context,
        "layer_norm_epsilon": layer.norm.eps,
        "rotary_dim": layer.attention.rope.rotary_dim,
        "activation_function": base.WRITTEN_ACTIVATIONS[layer.mlp.activation],
        "tie_word_embeddings": config.is_tied,
    }


def rules(config: ModelConfig) -> dict[str, Rule]:
    """Returns the rules; see `Family.rules`."""
    table = {
        "embedding": tensor_names.same("transformer.wte.weight"),
        "head_bias": tensor_names.same("lm_head.bias"),
    }
    if config.final_norm is not None:
        table |= tensor_names.norm(config.final_norm, "final_norm", "transformer.ln_f")
    if not config.is_tied:
        table["head"] = tensor_names.same("lm_head.weight")
    for i, layer in enumerate(config.layers):
        ours, theirs = f"layer_{i}", f"transformer.h.{i}"
        table |= tensor_names.norm(layer.norm, f"{ours}/attention_norm", f"{theirs}.ln_1")
        attention = tensor_names.fused_qkv(layer.attention, f"{theirs}.attn.qkv_proj", *_blocked(layer.attention))
        attention |= tensor_names.attention_out(layer.attention, f"{theirs}.attn.out_proj", config.width)
        up, down = f"{theirs}.mlp.fc_in", f"{theirs}.mlp.fc_out"
        table |= tensor_names.under(f"{ours}/attention", attention)
        table |= tensor_names.under(f"{ours}/mlp", tensor_names.plain_mlp(layer.mlp, up, down))
    return table


def _blocked(config: AttentionConfig) -> tuple[Callable, Callable]:
    """Returns `unpack` and `pack` for blocks of query, value and key, with interleaved rotated lanes."""
    N, H = config.num_heads, config.head_dim
    assert config.rope is not None
    lanes = config.rope.rotary_dim or H
    halves = [*range(0, lanes, 2), *range(1, lanes, 2), *range(lanes, H)]

    def order(part, lanes):
        return part.reshape(N, H, *part.shape[1:])[:, lanes].reshape(part.shape)

    def unpack(weight):
        blocks = weight.reshape(_NUM_BLOCKS, 3, N // _NUM_BLOCKS * H, *weight.shape[1:])
        q, v, k = (blocks[:, i].reshape(N * H, *weight.shape[1:]) for i in range(3))
        return order(q, halves), order(k, halves), v

    def pack(parts):
        q, k, v = parts
        back = np.argsort(halves)
        blocks = [part.reshape(_NUM_BLOCKS, -1, *part.shape[1:]) for part in (order(q, back), v, order(k, back))]
        return np.stack(blocks, axis=1).reshape(3 * N * H, *q.shape[1:])

    return unpack, pack


def canonical(name: str) -> str | None:
    """Ignores the attention masks of old checkpoints; see `Family.canonical`."""
    return None if name.endswith((".attn.causal_mask", ".attn.bias", ".attn.masked_bias")) else name


FAMILY = Family("codegen", read_config, write_config, rules, canonical)
