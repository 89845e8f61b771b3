"""The state of a layer with the gated delta rule: what it keeps instead of keys and values.

A state cannot be cut back to fewer tokens. A pass therefore does not change it. It returns the state with its updates,
and `commit` applies those of the tokens that are kept. This costs one product per layer, whatever the number of tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bass_jax.models.model_config import GatedDeltaConfig
from bass_jax.typing import Array, Int


class RecurrentState(NamedTuple):
    """The state of one layer after a row's committed tokens."""

    state: Array  # [B, K, R, A, V] float32, maps a key to a value
    inputs: Array  # [B, K, W - 1, C], of the convolution, at the last W - 1 tokens


class PendingState(NamedTuple):
    """The state of one layer before a pass, and what the T tokens of the pass add."""

    before: RecurrentState
    keys: Array  # [B, K, T, A] float32
    updates: Array  # [B, K, R, T, V] float32, what each token writes at its key
    log_decays: Array  # [B, K, R, T] float32, sums of logarithms from the first token of the pass on
    inputs: Array  # [B, K, T, C], of the convolution
    num_tokens: Array  # [B] int32, tokens of the pass without padding


def allocate_states(layers: Sequence[GatedDeltaConfig], batch: int, dtype: jnp.dtype) -> tuple[RecurrentState, ...]:
    """Returns states without tokens; `dtype` is that of the convolution's inputs."""

    def empty(layer: GatedDeltaConfig) -> RecurrentState:
        K, R = layer.num_key_heads, layer.values_per_key
        state = jnp.zeros((batch, K, R, layer.key_dim, layer.value_dim), jnp.float32)
        return RecurrentState(state, jnp.zeros((batch, K, layer.kernel_size - 1, layer.num_lanes), dtype))

    return tuple(map(empty, layers))


def commit_state(pending: PendingState, num_kept: Int[Array, "B"]) -> RecurrentState:
    """Returns the state after the first `num_kept` tokens of the pass; padding is never kept."""
    state, inputs = pending.before
    num_kept = jnp.minimum(num_kept, pending.num_tokens)
    is_kept = (jnp.arange(pending.keys.shape[2]) < num_kept[:, None])[:, None, None]
    last = jnp.maximum(num_kept - 1, 0)[:, None, None, None]
    total = jnp.where((num_kept > 0)[:, None, None, None], jnp.take_along_axis(pending.log_decays, last, axis=3), 0.0)
    factors = jnp.where(is_kept, jnp.exp(total - pending.log_decays), 0.0)
    updates = jnp.where(is_kept[..., None], pending.updates, 0.0) * factors[..., None]
    written = jnp.einsum("bkta,bkrtv->bkrav", pending.keys, updates, precision=jax.lax.Precision.HIGHEST)
    joined = jnp.concatenate([inputs, pending.inputs], axis=2)
    columns = num_kept[:, None] + jnp.arange(inputs.shape[2])
    inputs = jnp.take_along_axis(joined, columns[:, None, :, None], axis=2)
    return RecurrentState(jnp.exp(total)[..., None] * state + written, inputs)


def keep_candidate_state(pending: PendingState, candidate: Int[Array, "B"], num_candidates: int) -> PendingState:
    """Selects the tokens of one candidate draft per row after a pass over M of them, whose rows are ``B * M``."""
    rows = jnp.arange(candidate.shape[0]) * num_candidates + candidate
    return jax.tree.map(lambda leaf: leaf[rows], pending)
