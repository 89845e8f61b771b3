"""Recurrent layers with the gated delta rule (Gated DeltaNet; Yang, Kautz, Hatamizadeh, arXiv 2412.06464).

Each value head has a state S that maps keys to values. A token with key k, value v, decay d and rate b replaces part of
what the state gives for its key: ``S <- d S + k (b (v - (d S)^T k))^T``. The result of its query q is ``S^T q``.

The tokens of a pass are computed together (section 3.3 of the paper). With the products of decays up to each token,
what a token writes, its *update*, depends linearly on the updates before it, so a triangular system gives all of them.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from bass_jax.models.attention import LayerOutput
from bass_jax.models.mlp import ACTIVATIONS
from bass_jax.models.model_config import GatedDeltaConfig, ModelConfig
from bass_jax.models.norm import Normed, apply_norm, declare_norm, project
from bass_jax.models.parameters import declare, ones, zeros
from bass_jax.models.recurrent_state import PendingState, RecurrentState, allocate_states, commit_state
from bass_jax.models.weights import Weight, declare_weight, multiply
from bass_jax.typing import Array, Float

BLOCK = 64
"""Tokens of a whole sequence that are computed together."""

MAX_SUBSTITUTED = 16
"""Tokens of a pass up to which its triangular systems are solved by substitution, written out token by token.

The library of a GPU that solves them cannot be in a CUDA graph, and that of a CPU is three times as slow for 8 rows."""

_HIGHEST = jax.lax.Precision.HIGHEST


class GatedDelta(nn.Module):
    """The mixer of a recurrent layer.

    The parameters are, with the sizes of `GatedDeltaConfig`:

    * ``qkvz [K, C + R V, D]``: of each key head the query, the key, R values, and the gates of R results;
    * ``rates [K, 2 R, D]``: the logits of R rates, then what R decays are computed from;
    * ``kernel [K, C, W]``: a causal convolution of each lane of queries, keys and values;
    * ``decay_log [K, R]`` and ``decay_bias [K, R]``: the logarithm of a decay is
      ``-exp(decay_log) softplus(a + decay_bias)``;
    * ``norm [V]``, and ``out [D, K, R, V]``.

    Attributes:
        config: of the model.
        mixer: of the layer.
    """

    config: ModelConfig
    mixer: GatedDeltaConfig

    @nn.compact
    def __call__(self, x: Normed, is_token, before: RecurrentState | None, num_candidates: int = 1) -> LayerOutput:
        """Computes the tokens of this pass.

        Args:
            x: ``[B, T, D]``.
            is_token: ``[B, T]`` bool, False for padding, which comes last.
            before: the layer's state; None if the tokens are whole sequences.
            num_candidates: the tokens of a row are this many candidate drafts, which follow the same state.

        Returns:
            The result, with a `PendingState` as `LayerOutput.keys`, whose rows are ``B * num_candidates``; None for
            whole sequences.
        """
        config, mixer = self.config, self.mixer
        K, R, A, V = mixer.num_key_heads, mixer.values_per_key, mixer.key_dim, mixer.value_dim
        C, W, D = mixer.num_lanes, mixer.kernel_size, config.width
        qkvz = declare_weight(self, "qkvz", (K, C + R * V, D), ("kv_heads", None, "embed"))
        kernel = declare(self, "kernel", (K, C, W), ("kv_heads", None, None))
        rates = declare(self, "rates", (K, 2 * R, D), ("kv_heads", None, "embed"))
        decay_log = declare(self, "decay_log", (K, R), ("kv_heads", None), zeros)
        decay_bias = declare(self, "decay_bias", (K, R), ("kv_heads", None), ones)
        norm = declare_norm(self, "norm", mixer.norm, V, axis=None)
        out = declare_weight(self, "out", (D, K, R, V), ("embed", "kv_heads", None, None))

        shape = is_token.shape
        batch, T = shape[0] * num_candidates, shape[1] // num_candidates
        projected = project(x, qkvz, rounds_to=config.rounds_to).reshape(batch, T, K, -1)
        raw = project(x, Weight(rates, None), rounds_to=config.product_dtype).astype(jnp.float32)
        raw = raw.reshape(batch, T, K, 2 * R)
        betas = jax.nn.sigmoid(raw[..., :R])
        log_decays = -jnp.exp(decay_log.astype(jnp.float32)) * jax.nn.softplus(raw[..., R:] + decay_bias)
        betas, log_decays = (jnp.moveaxis(one, 1, 3) for one in (betas, log_decays))  # [B, K, R, T]
        old = before or allocate_states((mixer,), batch, projected.dtype)[0]
        if num_candidates > 1:
            old = jax.tree.map(lambda leaf: jnp.repeat(leaf, num_candidates, axis=0), old)

        inputs = projected[..., :C].swapaxes(1, 2)
        mixed = _convolve(jnp.concatenate([old.inputs, inputs], axis=2), kernel)
        mixed = ACTIVATIONS[mixer.activation](mixed.astype(inputs.dtype)).astype(jnp.float32)
        queries, keys = _unit(mixed[..., :A]) * A**-0.5, _unit(mixed[..., A : 2 * A])
        values = jnp.moveaxis(mixed[..., 2 * A :].reshape(batch, K, T, R, V), 3, 2)  # [B, K, R, T, V]
        if before is None:
            results, pending = _whole_sequences(queries, keys, values, log_decays, betas, old.state), None
        else:
            results, updates, sums = gated_delta_rule(queries, keys, values, log_decays, betas, old.state)
            num_tokens = is_token.reshape(batch, T).sum(axis=1, dtype=jnp.int32)
            pending = PendingState(old, keys, updates, sums, inputs, num_tokens)

        results = jnp.moveaxis(results, 3, 1).astype(projected.dtype)  # [B, T, K, R, V]
        gates = jax.nn.silu(projected[..., C:].astype(jnp.float32)).reshape(results.shape)
        results = (apply_norm(mixer.norm, results, norm) * gates).astype(projected.dtype)
        out = Weight(out.values.reshape(D, K * R * V), out.scale)
        y = multiply(results.reshape(*shape, K * R * V), out, rounds_to=config.rounds_to).astype(projected.dtype)
        return LayerOutput(y, pending, None, None, None)  # type: ignore[arg-type]


def _convolve(inputs: Float[Array, "B K L C"], kernel: Float[Array, "K C W"]) -> Float[Array, "B K T C"]:
    """Returns the weighted sums of W consecutive inputs, ``T = L - W + 1``, in float32."""
    width = kernel.shape[-1]
    num = inputs.shape[2] - width + 1
    wide, kernel = inputs.astype(jnp.float32), kernel.astype(jnp.float32)
    parts = [wide[:, :, at : at + num] * kernel[:, None, :, at] for at in range(width)]
    return sum(parts[1:], parts[0])


def _unit(x: Float[Array, "... A"]) -> Float[Array, "... A"]:
    return x * jax.lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def gated_delta_rule(
    queries: Float[Array, "B K T A"],
    keys: Float[Array, "B K T A"],
    values: Float[Array, "B K R T V"],
    log_decays: Float[Array, "B K R T"],
    betas: Float[Array, "B K R T"],
    state: Float[Array, "B K R A V"],
) -> tuple[Float[Array, "B K R T V"], Float[Array, "B K R T V"], Float[Array, "B K R T"]]:
    """Applies the rule to consecutive tokens, all float32.

    Returns:
        The results, the updates, and the sums of the logarithms of decays up to each token, itself included.
    """
    sums = jnp.cumsum(log_decays, axis=-1)
    T = sums.shape[-1]
    index = jnp.arange(T)
    # The decay from token s to token t, [B, K, R, t, s]. A difference of two sums from the start would lose precision.
    steps = jnp.where(index[:, None] > index, log_decays[..., :, None], 0.0)
    decays = jnp.exp(jnp.where(index[:, None] >= index, jnp.cumsum(steps, axis=-2), -jnp.inf))
    from_start = jnp.exp(sums)[..., None]

    def read_state(heads):
        return from_start * jnp.einsum("bkta,bkrav->bkrtv", heads, state, precision=_HIGHEST)

    def scores(heads):
        return decays * jnp.einsum("bkta,bksa->bkts", heads, keys, precision=_HIGHEST)[:, :, None]

    updates = betas[..., None] * (values - read_state(keys))
    if T > 1:
        updates = _solve(betas[..., None] * scores(keys), updates)
    own = jnp.einsum("bkrts,bkrsv->bkrtv", scores(queries), updates, precision=_HIGHEST)
    return read_state(queries) + own, updates, sums


def _solve(system: Float[Array, "... T T"], values: Float[Array, "... T V"]) -> Float[Array, "... T V"]:
    """Solves triangular systems. The diagonals are taken as 1, and the parts above them are not read."""
    T = values.shape[-2]
    if T > MAX_SUBSTITUTED:
        return jax.lax.linalg.triangular_solve(system, values, left_side=True, lower=True, unit_diagonal=True)
    solved = [values[..., 0, :]]
    for t in range(1, T):
        known = sum(system[..., t, s, None] * solved[s] for s in range(t))
        solved.append(values[..., t, :] - known)
    return jnp.stack(solved, axis=-2)


def _whole_sequences(queries, keys, values, log_decays, betas, state) -> Float[Array, "B K R T V"]:
    """Applies the rule block by block; `state` is empty. Arguments are those of `gated_delta_rule`."""
    T = queries.shape[2]
    size = min(BLOCK, T)
    num_blocks = -(-T // size)

    def blocks(x, axis):
        """Splits the axis of tokens, padded with zeros, which change nothing, and moves the blocks to the front."""
        pads = [(0, num_blocks * size - T if index == axis else 0) for index in range(x.ndim)]
        x = jnp.pad(x, pads)
        return jnp.moveaxis(x.reshape(*x.shape[:axis], num_blocks, size, *x.shape[axis + 1 :]), axis, 0)

    def run(state, block):
        block_queries, block_keys, block_values, block_decays, block_betas = block
        results, updates, sums = gated_delta_rule(
            block_queries, block_keys, block_values, block_decays, block_betas, state
        )
        batch = state.shape[0]
        nothing = jnp.zeros((batch, 1, 0, 1))
        num = jnp.full(batch, size, jnp.int32)
        pending = PendingState(RecurrentState(state, nothing), block_keys, updates, sums, nothing, num)
        return commit_state(pending, num).state, results

    tokens = blocks(queries, 2), blocks(keys, 2), blocks(values, 3), blocks(log_decays, 3), blocks(betas, 3)
    _, results = jax.lax.scan(run, state, tokens)
    joined = jnp.moveaxis(results, 0, 3)  # [B, K, R, blocks, size, V]
    return joined.reshape(*joined.shape[:3], num_blocks * size, -1)[:, :, :, :T]
