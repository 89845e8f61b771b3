"""Model configurations from flat keyword arguments, so that a test can change a field of all layers."""

import dataclasses

from bass_jax.models import (
    AttentionConfig,
    DenseMLP,
    GatedDeltaConfig,
    LayerConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    RopeConfig,
)

_ATTENTION = {
    "num_heads": "num_heads",
    "num_kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "has_attention_bias": "has_bias",
    "has_out_bias": "has_out_bias",
    "attention_scale": "scale",
    "attention_softcap": "softcap",
}
_ROPE = {"rope_base": "base", "rotary_dim": "rotary_dim", "rope_scaling": "scaling"}
_MLP = {"mlp_width": "width", "activation": "activation", "is_gated": "is_gated", "has_mlp_bias": "has_bias"}
_NORM = {"norm": "kind", "norm_eps": "eps", "norm_offset": "offset"}
_LAYER = {"block": "block", "has_parallel_mlp_norm": "has_parallel_mlp_norm"}


def flat_config(
    *,
    num_layers: int,
    window: int | None = None,
    windowed_layers: tuple[bool, ...] | None = None,
    window_rope_base: float | None = None,
    has_qk_norm: bool = False,
    has_final_norm: bool = True,
    moe: MoEConfig | None = None,
    recurrence: GatedDeltaConfig | None = None,
    **fields,
) -> ModelConfig:
    """Returns a configuration whose layers are equal except for their windows.

    With `moe`, all layers have these experts instead of a dense MLP. With `recurrence`, all but the last have this
    mixer instead of attention. Every other keyword is a field of `ModelConfig`, or of one of the parts of a layer as
    mapped above.
    """

    def take(names):
        return {field: fields.pop(name) for name, field in names.items() if name in fields}

    rope, norm = RopeConfig(**take(_ROPE)), NormConfig(**take(_NORM))
    dense, attention, layer = DenseMLP(**take(_MLP)), take(_ATTENTION), take(_LAYER)
    qk_norm = norm if has_qk_norm else None
    local_rope = rope if window_rope_base is None else RopeConfig(window_rope_base, rope.rotary_dim)

    def layer_config(is_windowed):
        layer_rope = None if fields.get("has_learned_positions") else local_rope if is_windowed else rope
        layer_window = window if is_windowed else None
        made = AttentionConfig(**attention, rope=layer_rope, window=layer_window, qk_norm=qk_norm)
        return LayerConfig(made, moe or dense, norm, **layer)

    layers = tuple(map(layer_config, windowed_layers or (window is not None,) * num_layers))
    if recurrence is not None:
        layers = (*(dataclasses.replace(layer, mixer=recurrence) for layer in layers[:-1]), layers[-1])
    return ModelConfig(layers=layers, final_norm=norm if has_final_norm else None, **fields)
