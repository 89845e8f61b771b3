"""Llama 2 and 3, SmolLM2, TinyLlama and other models with their layout."""

from collections.abc import Callable, Mapping
from typing import Any

from bass_jax.models.families import base, rope, tensor_names
from bass_jax.models.families.base import Family, Rule
from bass_jax.models.model_config import (
    AttentionConfig,
    DenseMLP,
    GatedDeltaConfig,
    LayerConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    RopeConfig,
)


def read_config(
    source: Mapping[str, Any],
    family: str = "llama",
    *,
    is_tied: bool = False,
    activation: str = "hidden_act",
    rope_base: float = 10000.0,
    rotary_share: float | None = None,
) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`. Families with a similar layout call it and edit the result.

    Args:
        source: the Hugging Face configuration.
        family: name of the family.
        is_tied: default of ``tie_word_embeddings``.
        activation: the key of the activation.
        rope_base: default of ``rope_theta``.
        rotary_share: default of ``partial_rotary_factor``; None for a family that rotates all lanes.
    """
    width, num_heads = base.read_integer(source, "hidden_size"), base.read_integer(source, "num_attention_heads")
    head_dim = base.read_integer(source, "head_dim", width // max(num_heads, 1), is_nullable=True)
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=base.read_integer(source, "num_key_value_heads", num_heads, is_nullable=True),
        head_dim=head_dim,
        rope=rope.read_rope(source, head_dim, default_base=rope_base, default_share=rotary_share),
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
    layer, attention = config.layers[0], config.attentions[0]
    # Layers can be without rotary positions.
    rotary = next((attention.rope for attention in config.attentions if attention.rope is not None), RopeConfig())
    ropes = rope.write_rope(rotary)
    if rotary.rotary_dim is not None:
        ropes["partial_rotary_factor"] = rotary.rotary_dim / attention.head_dim
    dense = next((layer.mlp for layer in config.layers if isinstance(layer.mlp, DenseMLP)), None)
    sizes = {} if dense is None else {"intermediate_size": dense.width, "mlp_bias": dense.has_bias}
    return sizes | {
        "architectures": [architecture],
        "model_type": config.family,
        "hidden_act": base.WRITTEN_ACTIVATIONS[layer.mlp.activation],
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": config.context,
        "rope_parameters": ropes,
        "rms_norm_eps": layer.norm.eps,
        "tie_word_embeddings": config.is_tied,
        "attention_bias": attention.has_bias,
    }


def rules(
    config: ModelConfig,
    *,
    attention: Callable[[AttentionConfig, str, int], dict[str, Rule]] | None = None,
    mlp: Callable[[Any, str], dict[str, Rule]] | None = None,
    norms: Mapping[str, str] | None = None,
    recurrence: Callable[[GatedDeltaConfig, str, int], dict[str, Rule]] | None = None,
) -> dict[str, Rule]:
    """Returns the rules; see `Family.rules`. Families with other names call it with what differs.

    Args:
        config: of the model.
        attention: returns the rules of an attention, given its configuration, its stored name and the width.
        mlp: returns the rules of an MLP, given its configuration and the stored name of the layer.
        norms: the stored name of each of our norms.
        recurrence: returns the rules of a recurrent layer's mixer, like `attention`.
    """
    table = {"embedding": tensor_names.same("model.embed_tokens.weight")}
    if config.final_norm is not None:
        table |= tensor_names.norm(config.final_norm, "final_norm", "model.norm")
    if not config.is_tied:
        table["head"] = tensor_names.same("lm_head.weight")
    for i, layer in enumerate(config.layers):
        ours, theirs = f"layer_{i}", f"model.layers.{i}"
        if isinstance(layer.mixer, GatedDeltaConfig):
            assert recurrence is not None, "the family has no recurrent layers"
            of_mixer = recurrence(layer.mixer, f"{theirs}.linear_attn", config.width)
            table |= tensor_names.under(f"{ours}/gated_delta", of_mixer)
        else:
            of_mixer = (attention or attention_rules)(layer.mixer, f"{theirs}.self_attn", config.width)
            table |= tensor_names.under(f"{ours}/attention", of_mixer)
        table |= tensor_names.under(f"{ours}/mlp", (mlp or mlp_rules)(layer.mlp, theirs))
        for our_name, their_name in (norms or _NORMS[layer.block]).items():
            table |= tensor_names.norm(layer.norm, f"{ours}/{our_name}", f"{theirs}.{their_name}")
    return table


_NORMS = {
    "pre_norm": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "sandwich": {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    "output_norm": {
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    "parallel": {"attention_norm": "input_layernorm"},
}


def mlp_rules(config: DenseMLP | MoEConfig, theirs: str) -> dict[str, Rule]:
    """Returns the rules of a dense MLP or of experts, without their path."""
    if isinstance(config, MoEConfig):
        return tensor_names.experts(config, f"{theirs}.mlp")
    return tensor_names.gated_mlp(config, f"{theirs}.mlp")


def attention_rules(config: AttentionConfig, theirs: str, width: int) -> dict[str, Rule]:
    """Returns the rules of an attention, without their path."""
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
