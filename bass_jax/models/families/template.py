"""A made-up family: the file to copy for one of your own.

1. Name it as its checkpoints' ``config.json`` does under ``model_type``.
2. `read_config` says what `ModelConfig` shall be. Every key that changes the arithmetic is read or refused: a key that
   is passed over gives wrong numbers, and nothing else would tell.
3. `rules` says for every tensor of ours, by its path, which stored ones it is made of. `layouts` has what most
   families need; `tests/models` shows missing paths by name. A rule can be undone, so that models can be written back.
4. `write_config` is the inverse of `read_config`.
5. Call ``register_family(FAMILY)``, and the checkpoints load. (Inside the package, list it in ``__init__.py``.)
6. Add configurations to ``tests/models/cases.py`` if `transformers` has the family: the tests then compare logits,
   continuations and what is written back. Otherwise compare with whatever implementation there is, as
   ``tests/models/test_template_family.py`` does.
"""

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
    read_num_layers,
    read_number,
    refuse,
)
from bass_jax.models.model_config import AttentionConfig, DenseMLP, LayerConfig, ModelConfig, NormConfig, RopeConfig


def read_config(source: Mapping[str, Any]) -> ModelConfig:
    """Makes our configuration from a checkpoint's ``config.json``.

    Raises:
        ValueError: if a key is missing or asks for what this decoder does not do.
    """
    refuse(source, alibi=False)  # The decoder has no such positions.
    width, num_heads = read_integer(source, "dim"), read_integer(source, "heads")
    norm = NormConfig("rms", read_number(source, "eps", 1e-5))
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=read_integer(source, "kv_heads", num_heads),
        head_dim=width // max(num_heads, 1),
        rope=RopeConfig(read_number(source, "theta", 10000.0)),
    )
    mlp = DenseMLP(read_integer(source, "hidden"), read_activation(source, "act", "silu"))
    return ModelConfig(
        family="template",
        vocab_size=read_integer(source, "vocab"),
        width=width,
        context=read_integer(source, "max_len"),
        layers=(LayerConfig(attention, mlp, norm),) * read_num_layers(source, "depth"),
        final_norm=norm,
        is_tied=read_flag(source, "tied", False),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Makes the ``config.json`` of ours."""
    layer = config.layers[0]
    assert layer.attention.rope is not None
    return {
        "model_type": config.family,
        "vocab": config.vocab_size,
        "dim": config.width,
        "depth": config.num_layers,
        "heads": layer.attention.num_heads,
        "kv_heads": layer.attention.num_kv_heads,
        "hidden": layer.mlp.width,
        "max_len": config.context,
        "theta": layer.attention.rope.base,
        "eps": layer.norm.eps,
        "tied": config.is_tied,
        "act": WRITTEN_ACTIVATIONS[layer.mlp.activation],
    }


def rules(config: ModelConfig) -> dict[str, Rule]:
    """Says where each of our tensors comes from."""
    table = {"embedding": tensor_names.transposed("tok.weight"), "final_norm": tensor_names.same("out_norm.weight")}
    if not config.is_tied:
        table["head"] = tensor_names.transposed("head.weight")
    for i, layer in enumerate(config.layers):
        ours, theirs = f"layer_{i}", f"blocks.{i}"
        # All queries, then all keys, then all values, in one matrix.
        attention = tensor_names.fused_qkv(
            layer.attention, f"{theirs}.attn.qkv", *tensor_names.stacked(layer.attention)
        )
        attention |= tensor_names.attention_out(layer.attention, f"{theirs}.attn.out", config.width)
        table |= tensor_names.under(f"{ours}/attention", attention)
        table |= tensor_names.under(f"{ours}/mlp", tensor_names.gated_mlp(layer.mlp, f"{theirs}.mlp"))
        table[f"{ours}/attention_norm"] = tensor_names.same(f"{theirs}.norm_1.weight")
        table[f"{ours}/mlp_norm"] = tensor_names.same(f"{theirs}.norm_2.weight")
    return table


FAMILY = Family("template", read_config, write_config, rules)
