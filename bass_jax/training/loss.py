"""What a draft minimises."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from bass_jax.config import ModelConfig
from bass_jax.models.decoder import decoder
from bass_jax.training.batches import Batch
from bass_jax.training.config import LossConfig
from bass_jax.typing import Array, Bool, Float, Int, Params


class LossParts(NamedTuple):
    """Means over the batch's response tokens.

    Attributes:
        soft: cross-entropy to the target's law, in nats.
        hard: cross-entropy to its likeliest token, in nats.
        agreement: share of the positions where both models' likeliest token is the same.
        num_tokens: response tokens.
    """

    soft: Array
    hard: Array
    agreement: Array
    num_tokens: Array


def scored_logits(config: ModelConfig, params: Params, batch: Batch) -> Float[Array, "M O"]:
    """Runs the draft over whole sequences and scores the response positions alone."""
    columns = jnp.arange(batch.tokens.shape[1])
    # A position past the end marks padding.
    positions = jnp.where(columns < batch.lengths[:, None], columns, batch.tokens.shape[1])
    module, variables = decoder(config), {"params": params}
    features, _ = module.apply(variables, batch.tokens, positions, None, method="features")  # type: ignore
    rows = _take_rows(features.reshape(-1, config.width), batch.selected, batch.weights > 0)
    return module.apply(variables, rows[None], method="logits")[0]  # type: ignore


def distillation_loss(
    config: ModelConfig, params: Params, batch: Batch, weights: LossConfig
) -> tuple[Float[Array, ""], LossParts]:
    """Mixes the cross-entropies to the target's top law and to its likeliest token.

    The law is renormalised over the draft's output vocabulary; a position with nothing inside weighs 0.
    The soft part is the forward KL divergence plus the law's own entropy, which no parameter moves.

    Args:
        config: of the draft.
        params: of the draft, with its embedding.
        batch: see `Batch`.
        weights: of the two parts.

    Returns:
        ``(loss, parts)``: the loss per response token, in nats.
    """
    logits = scored_logits(config, params, batch)
    logprobs = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    count = jnp.maximum(batch.weights.sum(), 1)
    inside = jnp.take_along_axis(logprobs, jnp.maximum(batch.law_columns, 0), axis=1)
    soft = -(batch.weights[:, None] * batch.law_probs * inside).sum() / count
    # The first of the law's columns is the likeliest token's.
    is_inside = batch.weights * (batch.labels >= 0)
    hard = -(is_inside * inside[:, 0]).sum() / count
    agreement = (is_inside * (jnp.argmax(logits, axis=-1) == batch.labels)).sum() / count
    parts = LossParts(soft, hard, agreement, batch.weights.sum())
    return weights.soft_weight * soft + weights.hard_weight * hard, parts


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
