"""GPT-2, and GPT-BigCode (SantaCoder, StarCoder), which adds multi-query attention."""

from collections.abc import Callable, Mapping
from typing import Any

from bass_jax.models.families import base, tensor_names
from bass_jax.models.families.base import Family, Rule
from bass_jax.models.model_config import AttentionConfig, DenseMLP, LayerConfig, ModelConfig, NormConfig

ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""Second names of keys that `transformers` also reads."""


def read_gpt2(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    base.require_values(source, scale_attn_by_inverse_layer_idx=False)
    return _read(source, "gpt2", "gelu_new", base.read_integer(source, "n_head", 12))


def read_bigcode(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    num_kv_heads = 1 if base.read_flag(source, "multi_query", True) else base.read_integer(source, "n_head", 12)
    return _read(source, "gpt_bigcode", "gelu_pytorch_tanh", num_kv_heads)


def _read(source: Mapping[str, Any], family: str, activation: str, num_kv_heads: int) -> ModelConfig:
    base.check_aliases(source, ALIASES)
    width, num_heads = base.read_integer(source, "n_embd"), base.read_integer(source, "n_head")
    norm = NormConfig("layer", base.read_number(source, "layer_norm_epsilon", 1e-5))
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=width // max(num_heads, 1),
        rope=None,
        has_bias=True,
        scale=None if base.read_flag(source, "scale_attn_weights", True) else 1.0,
    )
    mlp = DenseMLP(
        width=base.read_integer(source, "n_inner", 4 * width, is_nullable=True),
        activation=base.read_activation(source, "activation_function", activation),
        is_gated=False,
        has_bias=True,
    )
    return ModelConfig(
        family=family,
        vocab_size=base.read_integer(source, "vocab_size"),
        width=width,
        context=base.read_integer(source, "n_positions", 1024),
        layers=(LayerConfig(attention, mlp, norm),) * base.read_num_layers(source, "n_layer"),
        final_norm=norm,
        has_learned_positions=True,
        is_tied=base.read_flag(source, "tie_word_embeddings", True),
    )


def write_gpt2(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    return _write(config) | {"architectures": ["GPT2LMHeadModel"]}


def write_bigcode(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    is_multi_query = config.layers[0].attention.num_kv_heads == 1
    return _write(config) | {"architectures": ["GPTBigCodeForCausalLM"], "multi_query": is_multi_query}


def _write(config: ModelConfig) -> dict[str, Any]:
    layer = config.layers[0]
    return {
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "n_embd": config.width,
        "n_head": layer.attention.num_heads,
        "n_layer": config.num_layers,
        "n_inner": layer.mlp.width,
        "n_positions": config.context,
        "layer_norm_epsilon": layer.norm.eps,
        "activation_function": base.WRITTEN_ACTIVATIONS[layer.mlp.activation],
        "scale_attn_weights": layer.attention.scale is None,
        "tie_word_embeddings": config.is_tied,
    }


def gpt2_rules(config: ModelConfig) -> dict[str, Rule]:
    """Returns the rules; see `Family.rules`. GPT-2 stores its matrices ``[in, out]``."""
    return _rules(config, tensor_names.stacked, is_in_first=True)


def bigcode_rules(config: ModelConfig) -> dict[str, Rule]:
    """Returns the rules; see `Family.rules`."""
    is_multi_query = config.layers[0].attention.num_kv_heads == 1
    return _rules(config, tensor_names.stacked if is_multi_query else tensor_names.per_head, is_in_first=False)


def _rules(config: ModelConfig, order: Callable[[AttentionConfig], tuple], *, is_in_first: bool) -> dict[str, Rule]:
    table = {
        "embedding": tensor_names.same("transformer.wte.weight"),
        "position_embedding": tensor_names.same("transformer.wpe.weight"),
    }
    if config.final_norm is not None:
        table |= tensor_names.norm(config.final_norm, "final_norm", "transformer.ln_f")
    if not config.is_tied:
        table["head"] = tensor_names.same("lm_head.weight")
    for i, layer in enumerate(config.layers):
        ours, theirs = f"layer_{i}", f"transformer.h.{i}"
        table |= tensor_names.norm(layer.norm, f"{ours}/attention_norm", f"{theirs}.ln_1")
        table |= tensor_names.norm(layer.norm, f"{ours}/mlp_norm", f"{theirs}.ln_2")
        attention = tensor_names.fused_qkv(
            layer.attention, f"{theirs}.attn.c_attn", *order(layer.attention), is_in_first=is_in_first
        )
        attention |= tensor_names.attention_out(
            layer.attention, f"{theirs}.attn.c_proj", config.width, is_in_first=is_in_first
        )
        up, down = f"{theirs}.mlp.c_fc", f"{theirs}.mlp.c_proj"
        table |= tensor_names.under(f"{ours}/attention", attention)
        mlp = tensor_names.plain_mlp(layer.mlp, up, down, is_in_first=is_in_first)
        table |= tensor_names.under(f"{ours}/mlp", mlp)
    return table


def canonical(name: str) -> str | None:
    """Ignores attention masks and adds the ``transformer.`` that the first checkpoints lack; see `Family.canonical`."""
    if name.endswith((".attn.bias", ".attn.masked_bias")):
        return None
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


GPT2 = Family("gpt2", read_gpt2, write_gpt2, gpt2_rules, canonical)
BIGCODE = Family("gpt_bigcode", read_bigcode, write_bigcode, bigcode_rules, canonical)
