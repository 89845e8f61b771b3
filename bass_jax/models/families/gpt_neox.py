"""GPT-NeoX and Pythia: partly rotated heads, and parallel attention and MLP."""

from collections.abc import Mapping
from typing import Any

from bass_jax.models.families import base, rope, tensor_names
from bass_jax.models.families.base import Family, Rule
from bass_jax.models.model_config import AttentionConfig, DenseMLP, LayerConfig, ModelConfig, NormConfig, RopeConfig


def read_config(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    width, num_heads = base.read_integer(source, "hidden_size"), base.read_integer(source, "num_attention_heads")
    head_dim = width // max(num_heads, 1)
    base.require_values(source, head_dim=head_dim)
    found = rope.find_rope(source)
    share = base.read_number(found, "partial_rotary_factor", base.read_number(source, "rotary_pct", 0.25))
    is_parallel = base.read_flag(source, "use_parallel_residual", True)
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        rope=RopeConfig(
            base=rope.read_base(found, base.read_number(source, "rotary_emb_base", 10000.0)),
            rotary_dim=int(head_dim * share),
            scaling=rope.read_scaling(found, source),
        ),
        has_bias=base.read_flag(source, "attention_bias", True),
    )
    mlp = DenseMLP(
        width=base.read_integer(source, "intermediate_size"),
        activation=base.read_activation(source, "hidden_act", "gelu"),
        is_gated=False,
        has_bias=True,
    )
    norm = NormConfig("layer", base.read_number(source, "layer_norm_eps", 1e-5))
    layer = LayerConfig(attention, mlp, norm, "parallel" if is_parallel else "pre_norm", is_parallel)
    return ModelConfig(
        family="gpt_neox",
        vocab_size=base.read_integer(source, "vocab_size"),
        width=width,
        context=base.read_integer(source, "max_position_embeddings", 2048),
        layers=(layer,) * base.read_num_layers(source, "num_hidden_layers"),
        final_norm=norm,
        is_tied=base.read_flag(source, "tie_word_embeddings", False),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    layer = config.layers[0]
    attention = layer.attention
    assert attention.rope is not None and attention.rope.rotary_dim is not None
    share = attention.rope.rotary_dim / attention.head_dim
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "intermediate_size": layer.mlp.width,
        "max_position_embeddings": config.context,
        "layer_norm_eps": layer.norm.eps,
        "use_parallel_residual": layer.block == "parallel",
        "rope_parameters": rope.write_rope(attention.rope) | {"partial_rotary_factor": share},
        "tie_word_embeddings": config.is_tied,
        "attention_bias": attention.has_bias,
        "hidden_act": base.WRITTEN_ACTIVATIONS[layer.mlp.activation],
    }


def rules(config: ModelConfig) -> dict[str, Rule]:
    """Returns the rules; see `Family.rules`."""
    table = {"embedding": tensor_names.same("gpt_neox.embed_in.weight")}
    if config.final_norm is not None:
        table |= tensor_names.norm(config.final_norm, "final_norm", "gpt_neox.final_layer_norm")
    if not config.is_tied:
        table["head"] = tensor_names.same("embed_out.weight")
    for i, layer in enumerate(config.layers):
        ours, theirs = f"layer_{i}", f"gpt_neox.layers.{i}"
        table |= tensor_names.norm(layer.norm, f"{ours}/attention_norm", f"{theirs}.input_layernorm")
        table |= tensor_names.norm(layer.norm, f"{ours}/mlp_norm", f"{theirs}.post_attention_layernorm")
        attention = tensor_names.fused_qkv(
            layer.attention, f"{theirs}.attention.query_key_value", *tensor_names.per_head(layer.attention)
        )
        attention |= tensor_names.attention_out(layer.attention, f"{theirs}.attention.dense", config.width)
        up, down = f"{theirs}.mlp.dense_h_to_4h", f"{theirs}.mlp.dense_4h_to_h"
        table |= tensor_names.under(f"{ours}/attention", attention)
        table |= tensor_names.under(f"{ours}/mlp", tensor_names.plain_mlp(layer.mlp, up, down))
    return table


def canonical(name: str) -> str | None:
    """Ignores the attention masks and frequencies of old checkpoints; see `Family.canonical`."""
    return None if name.endswith((".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq")) else name


FAMILY = Family("gpt_neox", read_config, write_config, rules, canonical)
