"""Falcon with rotary positions: parallel attention and MLP, and three layouts of the fused projection."""

from collections.abc import Mapping
from typing import Any

from bass_jax.models.families import base, rope, tensor_names
from bass_jax.models.families.base import Family, Rule, read_flag, read_integer
from bass_jax.models.model_config import AttentionConfig, DenseMLP, LayerConfig, ModelConfig, NormConfig


def read_config(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    base.require_values(source, alibi=False, n_embed=None)  # The decoder does not support ALiBi.
    width, num_heads = read_integer(source, "hidden_size"), read_integer(source, "num_attention_heads")
    is_new, is_multi_query = (
        read_flag(source, "new_decoder_architecture", False),
        read_flag(source, "multi_query", True),
    )
    is_parallel, has_bias = read_flag(source, "parallel_attn", True), read_flag(source, "bias", False)
    stored_kv_heads = read_integer(source, "num_kv_heads", num_heads, is_nullable=True)
    num_kv_heads = stored_kv_heads if is_new else 1 if is_multi_query else num_heads
    if not is_new and not is_multi_query and stored_kv_heads != num_heads:
        raise ValueError(f"config.json: num_kv_heads={stored_kv_heads}: expected {num_heads}")
    num_norms = read_integer(source, "num_ln_in_parallel_attn", 2 if is_new else 1, is_nullable=True)
    if num_norms not in ((1, 2) if is_new else (1,)) or not (is_parallel or not is_new):
        raise ValueError(
            f"config.json: num_ln_in_parallel_attn={num_norms}, parallel_attn={is_parallel}: expected parallel_attn in "
            "the new architecture, with 1 or 2 norms, and 1 norm otherwise"
        )
    head_dim = width // max(num_heads, 1)
    attention = AttentionConfig(num_heads, num_kv_heads, head_dim, rope.read_rope(source, head_dim), has_bias=has_bias)
    mlp = DenseMLP(
        read_integer(source, "ffn_hidden_size", 4 * width, is_nullable=True),
        base.read_activation(source, "activation", "gelu"),
        is_gated=False,
        has_bias=has_bias,
    )
    norm = NormConfig("layer", base.read_number(source, "layer_norm_epsilon", 1e-5))
    layer = LayerConfig(attention, mlp, norm, "parallel" if is_parallel else "pre_norm", is_parallel and num_norms == 2)
    return ModelConfig(
        family="falcon",
        vocab_size=read_integer(source, "vocab_size"),
        width=width,
        context=read_integer(source, "max_position_embeddings", 2048),
        layers=(layer,) * base.read_num_layers(source, "num_hidden_layers"),
        final_norm=norm,
        is_tied=read_flag(source, "tie_word_embeddings", True),
    )


def _is_new(config: ModelConfig) -> bool:
    """Returns whether the model has the layout of the new architecture, which has grouped heads or two norms."""
    layer = config.layers[0]
    is_grouped = 1 < layer.attention.num_kv_heads < layer.attention.num_heads
    return is_grouped or layer.has_parallel_mlp_norm


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    layer = config.layers[0]
    attention = layer.attention
    return {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "new_decoder_architecture": _is_new(config),
        "multi_query": attention.num_kv_heads == 1 and attention.num_heads > 1,
        "parallel_attn": layer.block == "parallel",
        "num_ln_in_parallel_attn": 2 if layer.has_parallel_mlp_norm else 1,
        "alibi": False,
        "bias": attention.has_bias,
        "ffn_hidden_size": layer.mlp.width,
        "activation": base.WRITTEN_ACTIVATIONS[layer.mlp.activation],
        "max_position_embeddings": config.context,
        "rope_parameters": rope.write_rope(attention.rope),
        "layer_norm_epsilon": layer.norm.eps,
        "tie_word_embeddings": config.is_tied,
    }


def rules(config: ModelConfig) -> dict[str, Rule]:
    """Returns the rules; see `Family.rules`."""
    layer = config.layers[0]
    table = {"embedding": tensor_names.same("transformer.word_embeddings.weight")}
    table |= tensor_names.norm(layer.norm, "final_norm", "transformer.ln_f")
    if not config.is_tied:
        table["head"] = tensor_names.same("lm_head.weight")
    norms = {"attention_norm": "input_layernorm"}
    if layer.block == "pre_norm":
        norms["mlp_norm"] = "post_attention_layernorm"
    elif layer.has_parallel_mlp_norm:
        norms = {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}
    for i, layer in enumerate(config.layers):
        ours, theirs, attention = f"layer_{i}", f"transformer.h.{i}", layer.attention
        for name, their_name in norms.items():
            table |= tensor_names.norm(layer.norm, f"{ours}/{name}", f"{theirs}.{their_name}")
        # All layouts are one: the queries of a key-value head, its key and its value, for each key-value head in turn.
        shape = attention.num_kv_heads, attention.queries_per_kv_head + 2, attention.head_dim
        fused = f"{theirs}.self_attention.query_key_value"
        of_attention = {"qkv": tensor_names.reshaped(f"{fused}.weight", (*shape, config.width), 2)}
        if attention.has_bias:
            of_attention["qkv_bias"] = tensor_names.reshaped(f"{fused}.bias", shape, 1)
        of_attention |= tensor_names.attention_out(attention, f"{theirs}.self_attention.dense", config.width)
        table |= tensor_names.under(f"{ours}/attention", of_attention)
        up, down = f"{theirs}.mlp.dense_h_to_4h", f"{theirs}.mlp.dense_4h_to_h"
        table |= tensor_names.under(f"{ours}/mlp", tensor_names.plain_mlp(layer.mlp, up, down))
    return table


FAMILY = Family("falcon", read_config, write_config, rules)
