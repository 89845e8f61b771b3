"""What a draft minimizes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.models.decoder import decoder
from bass_jax.models.model_config import ModelConfig
from bass_jax.training.batches import Batch
from bass_jax.training.distill_config import LossConfig
from bass_jax.typing import Array, Bool, Float, Int, Params

_LEAST = 1e-6
"""Probability that a distribution is taken to leave to what it does not name, at least: the divergences stay finite."""


class LossWeights(NamedTuple):
    """Of the parts of the loss, at one step; traced."""

    soft: Array | np.floating | float
    hard: Array | np.floating | float
    reverse: Array | np.floating | float = 0.0
    total_variation: Array | np.floating | float = 0.0
    hidden: Array | np.floating | float = 0.0


class LossParts(NamedTuple):
    """Means over the batch's response tokens.

    Attributes:
        soft: cross-entropy to the target's distribution, in nats.
        hard: cross-entropy to its most probable token, in nats.
        reverse: KL divergence from the draft's distribution to the target's, in nats; all tokens but the distribution's
            are one.
        total_variation: between the distributions; all tokens but the distribution's are one.
        hidden: squared error of the predicted hidden state over the mean square of the true one; 0 without.
        agreement: share of the positions where both models' most probable token is the same.
        num_tokens: response tokens.
    """

    soft: Array
    hard: Array
    reverse: Array
    total_variation: Array
    hidden: Array
    agreement: Array
    num_tokens: Array


def weights_at(config: LossConfig, share: float) -> LossWeights:
    """Returns the weights after that share of the steps."""
    return LossWeights(*(np.float32(config.weight_at(f"{name}_weight", share)) for name in LossWeights._fields))


def scored_features(
    config: ModelConfig, params: Params, batch: Batch, unroll: int = 1
) -> tuple[tuple[Float[Array, "M D"], ...], Float[Array, "M E"] | None]:
    """Runs the draft's body over whole sequences, and takes the response positions.

    A hidden-state draft runs `unroll` times. First it reads the target's hidden state everywhere, as before a first
    draft. In the last pass the positions take turns: of every ``2 unroll`` the last ``unroll - 1`` read what the draft
    predicted there, as before its later drafts; all that lies further back is true then, so most is true here too.

    Returns:
        Features of the first pass, and of the last where it is another; and the target's hidden state at the same
        positions, if the draft reads them.
    """
    columns = jnp.arange(batch.tokens.shape[1])
    # A position past the end marks padding.
    positions = jnp.where(columns < batch.lengths[:, None], columns, batch.tokens.shape[1])
    module, variables, tokens = decoder(config), {"params": params}, jnp.asarray(batch.tokens)

    def body(hidden):
        return module.apply(variables, tokens, positions, None, 1, hidden, method="hidden_states").hidden  # type: ignore

    if config.hidden_width is None:
        passes, truth = [body(None)], None
    else:
        truth = jnp.asarray(batch.hidden, config.dtype)
        passes = [body(_shifted(truth))]
        turn = (columns + jnp.arange(len(batch.tokens))[:, None]) % (2 * unroll)
        for _ in range(unroll - 1):
            predicted = module.apply(variables, passes[-1], method="next_hidden")
            read = jnp.where((turn > unroll)[..., None], _shifted(predicted), _shifted(truth))  # type: ignore
            passes = [passes[0], body(read)]
    is_real = jnp.asarray(batch.weights) > 0
    selected = jnp.asarray(batch.selected)
    rows = tuple(_take_rows(hidden_states.reshape(-1, config.width), selected, is_real) for hidden_states in passes)
    return rows, None if truth is None else truth.reshape(-1, truth.shape[-1])[batch.selected]


def scored_logits(config: ModelConfig, params: Params, batch: Batch) -> Float[Array, "M O"]:
    """Scores the response positions; a hidden-state draft reads the target's hidden states everywhere."""
    (hidden_states,), _ = scored_features(config, params, batch)
    return decoder(config).apply({"params": params}, hidden_states[None], method="logits")[0]  # type: ignore


def distillation_loss(
    config: ModelConfig, params: Params, batch: Batch, weights: LossWeights, unroll: int = 1
) -> tuple[Float[Array, ""], LossParts]:
    """Mixes distances between the draft's distribution and what is known of the target's.

    The soft part renormalizes the target's distribution over the draft's output vocabulary; a position with nothing
    inside weighs 0. A hidden-state draft's first pass and its last weigh the same.

    Args:
        config: of the draft.
        params: of the draft, with its embedding.
        batch: see `Batch`.
        weights: of the parts.
        unroll: see `LossConfig`.

    Returns:
        ``(loss, parts)``: the loss per response token.
    """
    passes, truth = scored_features(config, params, batch, unroll)
    each = [_loss_parts(config, params, batch, hidden_states, truth) for hidden_states in passes]
    parts: LossParts = jax.tree.map(lambda *values: sum(values) / len(values), *each)
    loss = sum(weight * getattr(parts, name) for name, weight in weights._asdict().items())
    return jnp.asarray(loss), parts


def _loss_parts(
    config: ModelConfig,
    params: Params,
    batch: Batch,
    hidden_states: Float[Array, "M D"],
    truth: Float[Array, "M E"] | None,
) -> LossParts:
    """Scores the hidden states of one pass."""
    module, variables = decoder(config), {"params": params}
    logits: Array = module.apply(variables, hidden_states[None], method="logits")[0]  # type: ignore
    # The most probable score rather than its place: XLA searches for the latter on a CPU element by element.
    most_probable = jax.lax.stop_gradient(logits.max(axis=-1))
    count = jnp.maximum(batch.weights.sum(), 1)

    def mean(values: Float[Array, "M"]) -> Float[Array, ""]:
        return (batch.weights * values).sum() / count

    chosen = jnp.take_along_axis(logits, jnp.maximum(batch.distribution_columns, 0), axis=1)
    inside = chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    # The first of the distribution's columns is the most probable token's.
    is_inside = batch.labels >= 0
    reverse, total_variation = _distances(batch, inside)
    hidden = jnp.zeros(())
    if truth is not None:
        predicted: Array = module.apply(variables, hidden_states[None], method="next_hidden")[0]  # type: ignore
        error, size = (jnp.square(x.astype(jnp.float32)).mean(axis=-1) for x in (predicted - truth, truth))
        hidden = mean(error / jnp.maximum(size, 1e-6))
    return LossParts(
        soft=mean(-(jnp.asarray(batch.distribution_probs) * inside).sum(axis=1)),
        hard=mean(jnp.where(is_inside, -inside[:, 0], 0.0)),
        reverse=mean(reverse),
        total_variation=mean(total_variation),
        hidden=hidden,
        agreement=mean(jnp.where(is_inside, chosen[:, 0] >= most_probable, 0.0)),
        num_tokens=batch.weights.sum(),
    )


def _distances(batch: Batch, inside: Float[Array, "M k"]) -> tuple[Float[Array, "M"], Float[Array, "M"]]:
    """Reverse KL divergence and total variation, per position, with one token for all that the distribution does not
    name.
    """
    is_known = batch.distribution_columns >= 0
    target = jnp.asarray(batch.distribution_probs) * batch.distribution_mass[:, None]
    draft = jnp.where(is_known, jnp.exp(inside), 0.0)
    target_rest, draft_rest = (jnp.maximum(1 - distribution.sum(axis=1), _LEAST) for distribution in (target, draft))
    known = jnp.where(is_known, draft * (inside - jnp.log(jnp.maximum(target, _LEAST))), 0.0)
    reverse = known.sum(axis=1) + draft_rest * (jnp.log(draft_rest) - jnp.log(target_rest))
    variation = (jnp.abs(target - draft).sum(axis=1) + jnp.abs(target_rest - draft_rest)) / 2
    return reverse, variation


def _shifted(hidden: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
    """To every position what belongs to the one before; the first reads zeros."""
    return jnp.pad(hidden, ((0, 0), (1, 0), (0, 0)))[:, :-1]


@jax.custom_vjp
def _take_rows(x: Float[Array, "P D"], selected: Int[Array, "M"], is_real: Bool[Array, "M"]) -> Float[Array, "M D"]:
    """Gathers rows, each real one at most once, so that the gradient gathers too.

    XLA's gradient of a gather is a scatter, which on a CPU runs element by element: it took a quarter of
    the training step.
    """
    del is_real
    return x[selected]


def _take_rows_forward(x, selected, is_real):
    return x[selected], (jnp.zeros((x.shape[0], 0)), selected, is_real)


def _take_rows_backward(saved, gradient):
    like, selected, is_real = saved
    num_rows = like.shape[0]
    # Padding is sent past the end and dropped.
    target = jnp.where(is_real, selected, num_rows)
    source = jnp.full(num_rows, len(selected)).at[target].set(jnp.arange(len(selected)), mode="drop")
    padded = jnp.pad(gradient, ((0, 1), (0, 0)))
    return padded[source], None, None


_take_rows.defvjp(_take_rows_forward, _take_rows_backward)
