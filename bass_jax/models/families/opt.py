"""OPT: learned positions with an offset of 2. The 350M has a narrow embedding and norms after each sum."""

from collections.abc import Mapping
from typing import Any

from bass_jax.models.families import base, tensor_names
from bass_jax.models.families.base import Family, Rule
from bass_jax.models.model_config import AttentionConfig, DenseMLP, LayerConfig, ModelConfig, NormConfig


def read_config(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    base.require_values(source, layer_norm_elementwise_affine=True)
    width, num_heads = base.read_integer(source, "hidden_size"), base.read_integer(source, "num_attention_heads")
    embedding_width = base.read_integer(source, "word_embed_proj_dim", width, is_nullable=True)
    is_before = base.read_flag(source, "do_layer_norm_before", True)
    has_bias = base.read_flag(source, "enable_bias", True)
    norm = NormConfig("layer")
    layer = LayerConfig(
        AttentionConfig(num_heads, num_heads, width // max(num_heads, 1), rope=None, has_bias=has_bias),
        DenseMLP(
            width=base.read_integer(source, "ffn_dim"),
            activation=base.read_activation(source, "activation_function", "relu"),
            is_gated=False,
            has_bias=has_bias,
        ),
        norm,
        "pre_norm" if is_before else "post_norm",
    )
    has_final_norm = is_before and not base.read_flag(source, "_remove_final_layer_norm", False)
    return ModelConfig(
        family="opt",
        vocab_size=base.read_integer(source, "vocab_size"),
        width=width,
        context=base.read_integer(source, "max_position_embeddings", 2048),
        layers=(layer,) * base.read_num_layers(source, "num_hidden_layers"),
        final_norm=norm if has_final_norm else None,
        has_learned_positions=True,
        position_offset=2,
        embedding_width=None if embedding_width == width else embedding_width,
        has_output_projection=embedding_width != width,
        is_tied=base.read_flag(source, "tie_word_embeddings", True),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    layer = config.layers[0]
    is_before = layer.block == "pre_norm"
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "word_embed_proj_dim": config.embedding_width or config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": layer.attention.num_heads,
        "ffn_dim": layer.mlp.width,
        "max_position_embeddings": config.context,
        "do_layer_norm_before": is_before,
        "_remove_final_layer_norm": is_before and config.final_norm is None,
        "enable_bias": layer.attention.has_bias,
        "activation_function": base.WRITTEN_ACTIVATIONS[layer.mlp.activation],
        "tie_word_embeddings": config.is_tied,
    }


def rules(config: ModelConfig) -> dict[str, Rule]:
    """Returns the rules; see `Family.rules`."""
    table = {
        "embedding": tensor_names.same("model.decoder.embed_tokens.weight"),
        "position_embedding": tensor_names.same("model.decoder.embed_positions.weight"),
    }
    if config.final_norm is not None:
        table |= tensor_names.norm(config.final_norm, "final_norm", "model.decoder.final_layer_norm")
    if config.has_output_projection:
        table["embedding_projection"] = tensor_names.same("model.decoder.project_in.weight")
        table["output_projection"] = tensor_names.same("model.decoder.project_out.weight")
    if not config.is_tied:
        table["head"] = tensor_names.same("lm_head.weight")
    for i, layer in enumerate(config.layers):
        ours, theirs = f"layer_{i}", f"model.decoder.layers.{i}"
        table |= tensor_names.norm(layer.norm, f"{ours}/attention_norm", f"{theirs}.self_attn_layer_norm")
        table |= tensor_names.norm(layer.norm, f"{ours}/mlp_norm", f"{theirs}.final_layer_norm")
        q, k, v = (f"{theirs}.self_attn.{name}_proj" for name in "qkv")
        attention = {"qkv": tensor_names.qkv(layer.attention, (q, k, v), "weight")}
        if layer.attention.has_bias:
            attention["qkv_bias"] = tensor_names.qkv(layer.attention, (q, k, v), "bias")
        attention |= tensor_names.attention_out(layer.attention, f"{theirs}.self_attn.out_proj", config.width)
        table |= tensor_names.under(f"{ours}/attention", attention)
        mlp = tensor_names.plain_mlp(layer.mlp, f"{theirs}.fc1", f"{theirs}.fc2")
        table |= tensor_names.under(f"{ours}/mlp", mlp)
    return table


def canonical(name: str) -> str | None:
    """Adds the ``model.`` that the first checkpoints lack; see `Family.canonical`."""
    return f"model.{name}" if name.startswith("decoder.") else name


FAMILY = Family("opt", read_config, write_config, rules, canonical)
