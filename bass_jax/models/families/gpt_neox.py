"""GPT-NeoX and Pythia: partly rotated heads, attention and mlp in parallel."""

from collections.abc import Mapping
from typing import Any

from bass_jax.models.families import rope, tensor_names
from bass_jax.models.families.base import (
    WRITTEN_ACTIVATIONS,
    Family,
    Rule,
    read_activation,
    read_flag,
    read_integer,
    read_number,
    refuse,
)
from bass_jax.models.model_config import ModelConfig


def read_config(source: Mapping[str, Any]) -> ModelConfig:
    """Makes our configuration from a Hugging Face one.

    Raises:
        ValueError: if a key is missing or asks for what this decoder does not do.
    """
    width, num_heads = read_integer(source, "hidden_size"), read_integer(source, "num_attention_heads")
    head_dim = width // max(num_heads, 1)
    refuse(source, head_dim=head_dim)
    found = rope.find_rope(source)
    share = read_number(found, "partial_rotary_factor", read_number(source, "rotary_pct", 0.25))
    is_parallel = read_flag(source, "use_parallel_residual", True)
    return ModelConfig(
        family="gpt_neox",
        vocab_size=read_integer(source, "vocab_size"),
        width=width,
        num_layers=read_integer(source, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        mlp_width=read_integer(source, "intermediate_size"),
        context=read_integer(source, "max_position_embeddings", 2048),
        norm="layer",
        norm_eps=read_number(source, "layer_norm_eps", 1e-5),
        block="parallel" if is_parallel else "pre_norm",
        has_parallel_mlp_norm=is_parallel,
        rotary_dim=int(head_dim * share),
        rope_base=rope.read_base(found, read_number(source, "rotary_emb_base", 10000.0)),
        rope_scaling=rope.read_scaling(found, source),
        is_tied=read_flag(source, "tie_word_embeddings", False),
        has_attention_bias=read_flag(source, "attention_bias", True),
        has_mlp_bias=True,
        is_gated=False,
        activation=read_activation(source, "hidden_act", "gelu"),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Makes the Hugging Face configuration of ours."""
    assert config.rotary_dim is not None
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_width,
        "max_position_embeddings": config.context,
        "layer_norm_eps": config.norm_eps,
        "use_parallel_residual": config.block == "parallel",
        "rope_parameters": rope.write_rope(config) | {"partial_rotary_factor": config.rotary_dim / config.head_dim},
        "tie_word_embeddings": config.is_tied,
        "attention_bias": config.has_attention_bias,
        "hidden_act": WRITTEN_ACTIVATIONS[config.activation],
    }


def rules(config: ModelConfig) -> dict[str, Rule]:
    """Says where each of our tensors comes from."""
    table = {
        "embedding": tensor_names.transposed("gpt_neox.embed_in.weight"),
        **tensor_names.norm(config, "final_norm", "gpt_neox.final_layer_norm"),
    }
    if not config.is_tied:
        table["head"] = tensor_names.transposed("embed_out.weight")
    for i in range(config.num_layers):
        ours, theirs = f"layer_{i}", f"gpt_neox.layers.{i}"
        table |= tensor_names.norm(config, f"{ours}/attention_norm", f"{theirs}.input_layernorm")
        table |= tensor_names.norm(config, f"{ours}/mlp_norm", f"{theirs}.post_attention_layernorm")
        attention = tensor_names.fused_qkv(
            config, f"{theirs}.attention.query_key_value", *tensor_names.per_head(config)
        )
        attention |= tensor_names.attention_out(config, f"{theirs}.attention.dense")
        up, down = f"{theirs}.mlp.dense_h_to_4h", f"{theirs}.mlp.dense_4h_to_h"
        table |= tensor_names.under(f"{ours}/attention", attention)
        table |= tensor_names.under(f"{ours}/mlp", tensor_names.plain_mlp(config, up, down))
    return table


def canonical(name: str) -> str | None:
    """Drops the masks and frequencies of old checkpoints."""
    if name.endswith((".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq")):
        return None
    return name


FAMILY = Family("gpt_neox", read_config, write_config, rules, canonical)
