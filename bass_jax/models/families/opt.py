"""OPT: learned positions from row 2 on; the 350M's norms after each sum and its narrow embedding."""

from collections.abc import Mapping
from typing import Any

from bass_jax.models.families import tensor_names
from bass_jax.models.families.base import (
    WRITTEN_ACTIVATIONS,
    Family,
    Rule,
    read_activation,
    read_flag,
    read_integer,
    refuse,
)
from bass_jax.models.model_config import ModelConfig


def read_config(source: Mapping[str, Any]) -> ModelConfig:
    """Makes our configuration from a Hugging Face one.

    Raises:
        ValueError: if a key is missing or asks for what this decoder does not do.
    """
    refuse(source, layer_norm_elementwise_affine=True)
    width, num_heads = read_integer(source, "hidden_size"), read_integer(source, "num_attention_heads")
    embedding_width = read_integer(source, "word_embed_proj_dim", width, is_nullable=True)
    is_before = read_flag(source, "do_layer_norm_before", True)
    has_bias = read_flag(source, "enable_bias", True)
    return ModelConfig(
        family="opt",
        vocab_size=read_integer(source, "vocab_size"),
        width=width,
        num_layers=read_integer(source, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=width // max(num_heads, 1),
        mlp_width=read_integer(source, "ffn_dim"),
        context=read_integer(source, "max_position_embeddings", 2048),
        norm="layer",
        block="pre_norm" if is_before else "post_norm",
        has_final_norm=is_before and not read_flag(source, "_remove_final_layer_norm", False),
        positions="learned",
        position_offset=2,
        embedding_width=None if embedding_width == width else embedding_width,
        has_output_projection=embedding_width != width,
        is_tied=read_flag(source, "tie_word_embeddings", True),
        has_attention_bias=has_bias,
        has_mlp_bias=has_bias,
        is_gated=False,
        activation=read_activation(source, "activation_function", "relu"),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Makes the Hugging Face configuration of ours."""
    is_before = config.block == "pre_norm"
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "word_embed_proj_dim": config.embedding_width or config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "ffn_dim": config.mlp_width,
        "max_position_embeddings": config.context,
        "do_layer_norm_before": is_before,
        "_remove_final_layer_norm": is_before and not config.has_final_norm,
        "enable_bias": config.has_attention_bias,
        "activation_function": WRITTEN_ACTIVATIONS[config.activation],
        "tie_word_embeddings": config.is_tied,
    }


def rules(config: ModelConfig) -> dict[str, Rule]:
    """Says where each of our tensors comes from."""
    table = {
        "embedding": tensor_names.transposed("model.decoder.embed_tokens.weight"),
        "position_embedding": tensor_names.same("model.decoder.embed_positions.weight"),
    }
    if config.has_final_norm:
        table |= tensor_names.norm(config, "final_norm", "model.decoder.final_layer_norm")
    if config.has_output_projection:
        table["embedding_projection"] = tensor_names.transposed("model.decoder.project_in.weight")
        table["output_projection"] = tensor_names.transposed("model.decoder.project_out.weight")
    if not config.is_tied:
        table["head"] = tensor_names.transposed("lm_head.weight")
    for i in range(config.num_layers):
        ours, theirs = f"layer_{i}", f"model.decoder.layers.{i}"
        table |= tensor_names.norm(config, f"{ours}/attention_norm", f"{theirs}.self_attn_layer_norm")
        table |= tensor_names.norm(config, f"{ours}/mlp_norm", f"{theirs}.final_layer_norm")
        q, k, v = (f"{theirs}.self_attn.{name}_proj" for name in "qkv")
        attention = {"qkv": tensor_names.qkv(config, (q, k, v), "weight")}
        if config.has_attention_bias:
            attention["qkv_bias"] = tensor_names.qkv(config, (q, k, v), "bias")
        attention |= tensor_names.attention_out(config, f"{theirs}.self_attn.out_proj")
        table |= tensor_names.under(f"{ours}/attention", attention)
        table |= tensor_names.under(f"{ours}/mlp", tensor_names.plain_mlp(config, f"{theirs}.fc1", f"{theirs}.fc2"))
    return table


def canonical(name: str) -> str | None:
    """Gives the first checkpoints' names their ``model.`` back."""
    return f"model.{name}" if name.startswith("decoder.") else name


FAMILY = Family("opt", read_config, write_config, rules, canonical)
