"""The feed-forward part of a layer."""

import functools

import flax.linen as nn
import jax.numpy as jnp

from bass_jax.config import ModelConfig
from bass_jax.models.norm import project
from bass_jax.models.tensors import declare, zeros

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
        gate_up = declare(self, "gate_up", (D, 2, F), ("embed", None, "mlp"))
        both = project("btd,dgf->btgf", x, gate_up)
        if config.has_mlp_bias:
            both += declare(self, "gate_up_bias", (2, F), (None, "mlp"), zeros)
        down = declare(self, "down", (F, D), ("mlp", "embed"))
        y = jnp.einsum("btf,fd->btd", ACTIVATIONS[config.activation](both[:, :, 0]) * both[:, :, 1], down)
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
        hidden = project("btd,df->btf", x, declare(self, "up", (D, F), ("embed", "mlp")))
        if config.has_mlp_bias:
            hidden += declare(self, "up_bias", (F,), ("mlp",), zeros)
        down = declare(self, "down", (F, D), ("mlp", "embed"))
        y = jnp.einsum("btf,fd->btd", ACTIVATIONS[config.activation](hidden), down)
        if config.has_mlp_bias:
            y += declare(self, "down_bias", (D,), ("embed",), zeros)
        return y
