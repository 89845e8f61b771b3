"""The feed-forward part of a layer."""

import functools

import flax.linen as nn

from bass_jax.models.model_config import ModelConfig
from bass_jax.models.norm import project
from bass_jax.models.parameters import declare, zeros
from bass_jax.models.weights import declare_weight, multiply

ACTIVATIONS = {
    "silu": nn.silu,
    "relu": nn.relu,
    "gelu": functools.partial(nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(nn.gelu, approximate=True),
}


class GatedMlp(nn.Module):
    """``down(activation(gate x) * up x)`` with gate and up in one product."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x):
        """Returns ``[B, T, D]`` of a `Normed` input."""
        config = self.config
        D, F = config.width, config.mlp_width
        gate_up = declare_weight(self, "gate_up", (D, 2, F), ("embed", None, "mlp"))
        both = project(x, gate_up, rounds_to=config.rounds_to)
        if config.has_mlp_bias:
            both += declare(self, "gate_up_bias", (2, F), (None, "mlp"), zeros)
        hidden = ACTIVATIONS[config.activation](both[:, :, 0]) * both[:, :, 1]
        y = _down(self, hidden)
        if config.has_mlp_bias:
            y += declare(self, "down_bias", (D,), ("embed",), zeros)
        return y


class PlainMlp(nn.Module):
    """``down(activation(up x))``."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x):
        """Returns ``[B, T, D]`` of a `Normed` input."""
        config = self.config
        D, F = config.width, config.mlp_width
        up = declare_weight(self, "up", (D, F), ("embed", "mlp"))
        hidden = project(x, up, rounds_to=config.rounds_to)
        if config.has_mlp_bias:
            hidden += declare(self, "up_bias", (F,), ("mlp",), zeros)
        y = _down(self, ACTIVATIONS[config.activation](hidden))
        if config.has_mlp_bias:
            y += declare(self, "down_bias", (D,), ("embed",), zeros)
        return y


def _down(module: GatedMlp | PlainMlp, hidden):
    """Multiplies ``[B, T, F]`` by the weight back to the residual stream's width."""
    config = module.config
    down = declare_weight(module, "down", (config.mlp_width, config.width), ("mlp", "embed"))
    return multiply(hidden, down, rounds_to=config.rounds_to).astype(hidden.dtype)
