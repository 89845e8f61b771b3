"""A mixture of experts in place of the MLP of a layer.

Every token gets all of its experts, whatever the other tokens chose: there is no capacity that a token could exceed. So
no row of a batch changes the output of another.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from bass_jax.models.mesh import has_axis
from bass_jax.models.mlp import ACTIVATIONS, MLP
from bass_jax.models.model_config import ModelConfig, MoEConfig
from bass_jax.models.norm import Normed
from bass_jax.models.parameters import declare, zeros
from bass_jax.models.weights import Weight, declare_weight
from bass_jax.runtime.cpu_workarounds import matmul
from bass_jax.typing import Array, Float, Int
from kernels_pallas import ops


class Routing(NamedTuple):
    """The experts of M tokens."""

    experts: Array  # [M, A] int32
    factors: Array  # [M, A] float32, on the experts' outputs or inputs


def route(moe: MoEConfig, logits: Float[Array, "M E"], choice_bias: Float[Array, "E"] | None = None) -> Routing:
    """Chooses the experts of every token.

    Args:
        moe: the kind of router.
        logits: float32.
        choice_bias: added to the scores for the choice of experts only.
    """
    scores = jax.nn.softmax(logits) if moe.score == "softmax" else jax.nn.sigmoid(logits)
    choice = scores if choice_bias is None else scores + choice_bias
    if moe.num_groups > 1:
        grouped = choice.reshape(*choice.shape[:-1], moe.num_groups, -1)
        best, _ = jax.lax.top_k(grouped, moe.num_group_scores)
        _, kept = jax.lax.top_k(best.sum(axis=-1), moe.num_active_groups)
        is_kept = (kept[..., None] == jnp.arange(moe.num_groups)).any(axis=-2)
        choice = jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(choice.shape)
    _, experts = jax.lax.top_k(choice, moe.num_active)
    factors = jnp.take_along_axis(scores, experts, axis=-1)
    if moe.is_normalized:
        # All scores of a sigmoid may be 0.
        factors /= factors.sum(axis=-1, keepdims=True) + 1e-20
    return Routing(experts, factors * moe.scale)


class MoE(nn.Module):
    """The sum of a token's experts, each multiplied by its factor, and of the shared MLP if there is one.

    The parameters of the experts are ``experts_gate_up [E, 2, F, D]`` and ``experts_down [E, D, F]``. The products are
    `kernels_pallas.ops.grouped_product`, which reads only the chosen experts on a GPU.
    """

    config: ModelConfig
    moe: MoEConfig

    @nn.compact
    def __call__(self, x):
        """Returns ``[B, T, D]`` for a `Normed` input."""
        config, moe = self.config, self.moe
        D, E, F = config.width, moe.num_experts, moe.width
        values = x.values if x.factor is None else (x.values * x.factor[..., None]).astype(x.values.dtype)
        tokens = values.reshape(-1, D)
        logits = matmul(tokens, declare(self, "router", (E, D), (None, "embed")), jnp.float32)
        bias = declare(self, "choice_bias", (E,), (None,), zeros, jnp.float32) if moe.has_choice_bias else None
        if moe.has_bias:
            logits += declare(self, "router_bias", (E,), (None,), zeros).astype(jnp.float32)
        gate_up = declare_weight(self, "experts_gate_up", (E, 2, F, D), ("experts", None, "mlp", "embed"))
        down = declare_weight(self, "experts_down", (E, D, F), ("experts", "embed", "mlp"))
        routing, gate_up_bias = route(moe, logits, bias), None
        if moe.has_bias:
            gate_up_bias = declare(self, "experts_gate_up_bias", (E, 2, F), ("experts", None, "mlp"), zeros)
        y = _run_on_mesh(config, moe, tokens, routing, gate_up, gate_up_bias, down)
        if moe.has_bias:
            down_bias = declare(self, "experts_down_bias", (E, D), (None, "embed"), zeros)
            y += jnp.einsum("ma,mad->md", routing.factors, down_bias[routing.experts].astype(jnp.float32))
        if moe.shared is not None:
            shared = MLP(config, moe.shared, name="shared")(Normed(values, None)).reshape(y.shape)
            if moe.has_shared_gate:
                gate = matmul(tokens, declare(self, "shared_gate", (1, D), (None, "embed")), jnp.float32)
                shared = jax.nn.sigmoid(gate) * shared
            y += shared
        return y.astype(values.dtype).reshape(values.shape)


def _run_on_mesh(
    config: ModelConfig, moe: MoEConfig, tokens, routing, gate_up, gate_up_bias, down
) -> Float[Array, "M D"]:
    """Runs the experts. On a mesh every device runs its part of its own experts on all tokens, and parts are added."""
    experts, width = (axis if has_axis(axis) else None for axis in config.expert_axes)
    axes = tuple(axis for axis in (experts, width) if axis is not None)
    if not axes:
        return run_experts(moe, tokens, routing, gate_up, gate_up_bias, down, 0)

    def run(tokens, routing, gate_up, gate_up_bias, down):
        first = 0 if experts is None else jax.lax.axis_index(experts) * gate_up.values.shape[0]
        return jax.lax.psum(run_experts(moe, tokens, routing, gate_up, gate_up_bias, down, first), axes)

    def specs(weight: Weight, *axes: str | None) -> Any:
        scale = None if weight.scale is None else PartitionSpec(*axes[: weight.scale.ndim])
        return Weight(PartitionSpec(*axes), scale)  # type: ignore

    # Explicit, because XLA partitions a grouped product by gathering all experts on every device.
    per_device = jax.shard_map(
        run,
        in_specs=(
            PartitionSpec(),
            PartitionSpec(),
            specs(gate_up, experts, None, width, None),
            PartitionSpec(experts, None, width),
            specs(down, experts, None, width),
        ),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return per_device(tokens, routing, gate_up, gate_up_bias, down)


def run_experts(
    moe: MoEConfig,
    tokens: Float[Array, "M D"],
    routing: Routing,
    gate_up: Weight,
    gate_up_bias: Float[Array, "E 2 F"] | None,
    down: Weight,
    first: Int[Array, ""] | int,
) -> Float[Array, "M D"]:
    """Returns the sum of the outputs of the chosen experts that are given, float32.

    Args:
        moe: the activation.
        tokens: the input.
        routing: experts are numbered over all experts of the layer.
        gate_up: ``[E', 2, F, D]`` of E' consecutive experts.
        gate_up_bias: ``[E', 2, F]``, or None.
        down: ``[E', D, F]`` of the same experts; their biases are not added.
        first: number of the first of them.
    """
    M, A = routing.experts.shape
    num_given, _, F, D = gate_up.values.shape
    expert = routing.experts.reshape(-1) - first  # those outside of the given ones have the product 0
    if moe.scales_input:
        tokens = jnp.repeat(tokens, A, axis=0)
        tokens = (tokens * routing.factors.reshape(-1, 1)).astype(tokens.dtype)

    def multiply(rows, weight):
        y = ops.grouped_product(rows, weight.values.reshape(num_given, -1, rows.shape[-1]), expert)
        if weight.scale is None:
            return y
        return y * weight.scale.reshape(num_given, -1).at[expert].get(mode="clip")

    projected = multiply(tokens, gate_up).reshape(-1, 2, F)
    if gate_up_bias is not None:
        projected += gate_up_bias.at[expert].get(mode="clip")
    gate, up = projected[:, 0].astype(tokens.dtype), projected[:, 1].astype(tokens.dtype)
    if moe.gate_limit is None:
        hidden = ACTIVATIONS[moe.activation](gate) * up
    else:
        gate, up = jnp.minimum(gate, moe.gate_limit), jnp.clip(up, -moe.gate_limit, moe.gate_limit)
        hidden = gate * jax.nn.sigmoid(moe.gate_slope * gate) * (up + 1)
    y = multiply(hidden, down)
    if not moe.scales_input:
        y *= routing.factors.reshape(-1, 1)
    return y.reshape(M, A, D).sum(axis=1)
