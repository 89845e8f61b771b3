"""The MLP of a layer."""

import functools

import flax.linen as nn

from bass_jax.models.model_config import DenseMLP, ModelConfig
from bass_jax.models.norm import project
from bass_jax.models.parameters import declare, zeros
from bass_jax.models.weights import declare_weight, multiply

ACTIVATIONS = {
    "silu": nn.silu,
    "relu": nn.relu,
    "gelu": functools.partial(nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(nn.gelu, approximate=True),
}


class MLP(nn.Module):
    """``down(activation(up x))``, or ``down(activation(gate x) * up x)`` with gate and up in one product."""

    config: ModelConfig
    mlp: DenseMLP

    @nn.compact
    def __call__(self, x):
        """Returns ``[B, T, D]`` for a `Normed` input."""
        config, mlp = self.config, self.mlp
        D, F = config.width, mlp.width
        name, parts = ("gate_up", (2,)) if mlp.is_gated else ("up", ())
        axes = (*(None for _ in parts), "mlp")
        up = declare_weight(self, name, (*parts, F, D), (*axes, "embed"))
        projected = project(x, up, rounds_to=config.rounds_to)
        if mlp.has_bias:
            projected += declare(self, f"{name}_bias", (*parts, F), axes, zeros)
        activate = ACTIVATIONS[mlp.activation]
        hidden = activate(projected[:, :, 0]) * projected[:, :, 1] if mlp.is_gated else activate(projected)
        down = declare_weight(self, "down", (D, F), ("embed", "mlp"))
        y = multiply(hidden, down, rounds_to=config.rounds_to).astype(hidden.dtype)
        if mlp.has_bias:
            y += declare(self, "down_bias", (D,), ("embed",), zeros)
        return y
