"""An invented family: the file to copy for a family of your own.

1. The name is the ``model_type`` in the ``config.json`` of the checkpoints.
2. `read_config` returns the `ModelConfig`. It reads or rejects every key that changes the arithmetic, because an
   ignored key would give wrong logits without an error.
3. `rules` returns, for the path of every tensor of ours, which stored tensors it is made of. `tensor_names` has the
   rules that most families need, and loading a checkpoint names missing paths. Rules are invertible, so that models can
   be written as well.
4. `write_config` inverts `read_config`.
5. ``register_family(FAMILY)`` registers the family. (Inside the package, list it in ``__init__.py``.)
6. If `transformers` has the family, add configurations to ``tests/models/cases.py``; the tests then compare logits,
   continuations and written checkpoints. Otherwise compare with another implementation, as
   ``tests/models/test_template_family.py`` does.
"""

from collections.abc import Mapping
from typing import Any

from bass_jax.models.families import base, tensor_names
from bass_jax.models.families.base import Family, Rule
from bass_jax.models.model_config import AttentionConfig, DenseMLP, LayerConfig, ModelConfig, NormConfig, RopeConfig


def read_config(source: Mapping[str, Any]) -> ModelConfig:
    """Makes our configuration from a checkpoint's ``config.json``.

    Raises:
        ValueError: if a key is missing or has a value that the decoder does not support.
    """
    base.require_values(source, alibi=False)  # The decoder does not support ALiBi.
    width, num_heads = base.read_integer(source, "dim"), base.read_integer(source, "heads")
    norm = NormConfig("rms", base.read_number(source, "eps", 1e-5))
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=base.read_integer(source, "kv_heads", num_heads),
        head_dim=width // max(num_heads, 1),
        rope=RopeConfig(base.read_number(source, "theta", 10000.0)),
    )
    mlp = DenseMLP(base.read_integer(source, "hidden"), base.read_activation(source, "act", "silu"))
    return ModelConfig(
        family="template",
        vocab_size=base.read_integer(source, "vocab"),
        width=width,
        context=base.read_integer(source, "max_len"),
        layers=(LayerConfig(attention, mlp, norm),) * base.read_num_layers(source, "depth"),
        final_norm=norm,
        is_tied=base.read_flag(source, "tied", False),
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
        "act": base.WRITTEN_ACTIVATIONS[layer.mlp.activation],
    }


def rules(config: ModelConfig) -> dict[str, Rule]:
    """Returns the rules; see `Family.rules`."""
    table = {"embedding": tensor_names.same("tok.weight"), "final_norm": tensor_names.same("out_norm.weight")}
    if not config.is_tied:
        table["head"] = tensor_names.same("head.weight")
    for i, layer in enumerate(config.layers):
        ours, theirs = f"layer_{i}", f"blocks.{i}"
        # One matrix with all queries, then all keys, then all values.
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
