"""Llama 2 and 3, SmolLM2, TinyLlama and other models with their layout."""

from collections.abc import Mapping
from typing import Any

from bass_jax.models.families import base, rope, tensor_names
from bass_jax.models.families.base import Family, Rule
from bass_jax.models.model_config import AttentionConfig, DenseMLP, LayerConfig, ModelConfig, NormConfig


def read_config(
    source: Mapping[str, Any], family: str = "llama", *, is_tied: bool = False, activation: str = "hidden_act"
) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`. Families with a similar layout call it and edit the result.

    Args:
        source: the Hugging Face configuration.
        family: name of the family.
        is_tied: default of ``tie_word_embeddings``.
        activation: the key of the activation.
    """
    width, num_heads = base.read_integer(source, "hidden_size"), base.read_integer(source, "num_attention_heads")
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=base.read_integer(source, "num_key_value_heads", num_heads, is_nullable=True),
        head_dim=base.read_integer(source, "head_dim", width // max(num_heads, 1), is_nullable=True),
        rope=rope.read_rope(source),
        has_bias=base.read_flag(source, "attention_bias", False),
    )
    mlp = DenseMLP(
        width=base.read_integer(source, "intermediate_size"),
        activation=base.read_activation(source, activation, "silu"),
        has_bias=base.read_flag(source, "mlp_bias", False),
    )
    norm = NormConfig("rms", base.read_number(source, "rms_norm_eps", 1e-6))
    return ModelConfig(
        family=family,
        vocab_size=base.read_integer(source, "vocab_size"),
        width=width,
        context=base.read_integer(source, "max_position_embeddings", 2048),
        layers=(LayerConfig(attention, mlp, norm),) * base.read_num_layers(source, "num_hidden_layers"),
        final_norm=norm,
        is_tied=base.read_flag(source, "tie_word_embeddings", is_tied),
    )


def write_config(config: ModelConfig, architecture: str = "LlamaForCausalLM") -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    layer = config.layers[0]
    attention = layer.attention
    return {
        "architectures": [architecture],
        "model_type": config.family,
        "hidden_act": base.WRITTEN_ACTIVATIONS[layer.mlp.activation],
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": layer.mlp.width,
        "max_position_embeddings": config.context,
        "rope_parameters": rope.write_rope(attention.rope),
        "rms_norm_eps": layer.norm.eps,
        "tie_word_embeddings": config.is_tied,
        "attention_bias": attention.has_bias,
        "mlp_bias": layer.mlp.has_bias,
    }


def rules(config: ModelConfig) -> dict[str, Rule]:
    """Returns the rules; see `Family.rules`."""
    table = {
        "embedding": tensor_names.same("model.embed_tokens.weight"),
        "final_norm": tensor_names.same("model.norm.weight"),
    }
    if not config.is_tied:
        table["head"] = tensor_names.same("lm_head.weight")
    for i, layer in enumerate(config.layers):
        ours, theirs = f"layer_{i}", f"model.layers.{i}"
        table |= tensor_names.under(
            f"{ours}/attention", _attention(layer.attention, f"{theirs}.self_attn", config.width)
        )
        table |= tensor_names.under(f"{ours}/mlp", tensor_names.gated_mlp(layer.mlp, f"{theirs}.mlp"))
        norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        if layer.block == "sandwich":
            norms |= {
                "attention_post_norm": "post_attention_layernorm",
                "mlp_norm": "pre_feedforward_layernorm",
                "mlp_post_norm": "post_feedforward_layernorm",
            }
        table |= {
            f"{ours}/{name}": tensor_names.same(f"{theirs}.{their_name}.weight") for name, their_name in norms.items()
        }
    return table


def _attention(config: AttentionConfig, theirs: str, width: int) -> dict[str, Rule]:
    q, k, v = (f"{theirs}.{name}_proj" for name in "qkv")
    table = {"qkv": tensor_names.qkv(config, (q, k, v), "weight")}
    if config.has_bias:
        table["qkv_bias"] = tensor_names.qkv(config, (q, k, v), "bias")
    if config.qk_norm is not None:
        table |= {
            "query_norm": tensor_names.same(f"{theirs}.q_norm.weight"),
            "key_norm": tensor_names.same(f"{theirs}.k_norm.weight"),
        }
    return table | tensor_names.attention_out(config, f"{theirs}.o_proj", width)


FAMILY = Family("llama", read_config, write_config, rules)
