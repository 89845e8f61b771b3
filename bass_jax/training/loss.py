"""The loss of a draft."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.drafters.eagle.eagle3 import Eagle3Model
from bass_jax.training.batches import TrainingBatch
from bass_jax.training.distill_config import LossConfig
from bass_jax.training.init_draft import Draft, reads_target
from bass_jax.typing import Array, Bool, Float, Int

_MIN_PROB = 1e-6
"""Lower bound of the probabilities in the divergences, which keeps them finite."""


class LossWeights(NamedTuple):
    """The weights of the parts of the loss at one step; traced."""

    soft: Array | np.floating | float
    hard: Array | np.floating | float
    reverse: Array | np.floating | float = 0.0
    total_variation: Array | np.floating | float = 0.0
    hidden: Array | np.floating | float = 0.0


class LossParts(NamedTuple):
    """Means over the response tokens of a batch; see `LossConfig`."""

    soft: Array  # cross-entropy to the target's distribution, nats
    hard: Array  # cross-entropy to the target's most probable token, nats
    reverse: Array  # KL divergence from the draft's distribution to the target's, nats
    total_variation: Array  # between the distributions
    hidden: Array  # squared error of predicted hidden states over the mean square of the true ones; 0 without
    agreement: Array  # share of positions where draft and target have the same most probable token
    num_tokens: Array  # response tokens


def weights_at(config: LossConfig, share: float) -> LossWeights:
    """Returns the weights after that share of the steps."""
    return LossWeights(*(np.float32(config.weight_at(f"{name}_weight", share)) for name in LossWeights._fields))


def response_hidden(
    draft: Draft, batch: TrainingBatch, unroll: int = 1
) -> tuple[tuple[Float[Array, "M D"], ...], Float[Array, "M E"] | None]:
    """Runs the draft over whole sequences and returns its hidden states at the response positions.

    A draft that reads the target's hidden states runs `unroll` times. The first pass reads them everywhere, as before
    the first draft of a step. In the last pass, of every ``2 unroll`` positions the last ``unroll - 1`` read the states
    that the draft predicted, as before its later drafts. The earlier positions then still read true states, as in
    decoding. This is the training-time test of EAGLE-3 without its own attention mask. In the second and last pass of a
    P-EAGLE head these positions read the mask.

    Returns:
        ``(passes, target_hidden)``: the draft's hidden states of the first pass, and of the last if there are several;
        and the target's hidden states at the same positions if the draft predicts them, else None.
    """
    columns = jnp.arange(batch.tokens.shape[1])
    # Padding has a position past the end.
    positions = jnp.where(columns < batch.lengths[:, None], columns, batch.tokens.shape[1])
    tokens, target_hidden = jnp.asarray(batch.tokens), None

    def run(hidden, tokens=tokens):
        return draft.hidden_states(tokens, positions, None, hidden).hidden

    if not reads_target(draft):
        passes = [run(None)]
    else:
        known = jnp.asarray(batch.hidden, draft.config.dtype)
        if isinstance(draft, Eagle3Model):
            known = draft.project(known)
        else:
            target_hidden = known
        passes = [run(_previous(known))]
        is_later = (columns + jnp.arange(len(batch.tokens))[:, None]) % (2 * unroll) > unroll
        if isinstance(draft, Eagle3Model) and draft.head.mask_token_id is not None and unroll > 1:
            hidden = jnp.where(is_later[..., None], draft.projected_mask(), _previous(known))
            passes.append(run(hidden, jnp.where(is_later, draft.head.mask_token_id, tokens)))
            unroll = 1
        for _ in range(unroll - 1):
            predicted = draft.next_hidden(passes[-1]).astype(known.dtype)
            passes = [passes[0], run(jnp.where(is_later[..., None], _previous(predicted), _previous(known)))]
    is_real, selected = jnp.asarray(batch.weights) > 0, jnp.asarray(batch.selected)
    rows = tuple(_take_rows(hidden.reshape(-1, draft.config.width), selected, is_real) for hidden in passes)
    if target_hidden is None:
        return rows, None
    return rows, target_hidden.reshape(-1, target_hidden.shape[-1])[batch.selected]


def response_logits(draft: Draft, batch: TrainingBatch) -> Float[Array, "M O"]:
    """Returns the logits at the response positions; the target's hidden states are read everywhere."""
    (hidden,), _ = response_hidden(draft, batch)
    return draft.logits(hidden[None])[0]


def distillation_loss(
    draft: Draft, batch: TrainingBatch, weights: LossWeights, unroll: int = 1
) -> tuple[Float[Array, ""], LossParts]:
    """Computes the weighted sum of distances between the draft's distribution and the target's.

    The soft part renormalizes the target's distribution over the draft's output vocabulary. A position without any of
    its tokens there counts 0. If there are several passes, the first and the last have equal weight.

    Args:
        draft: with its embedding.
        batch: the batch, with the target's hidden states if the draft reads them.
        weights: of the parts.
        unroll: see `LossConfig`.

    Returns:
        ``(loss, parts)``, means per response token.
    """
    passes, target_hidden = response_hidden(draft, batch, unroll)
    each = [_loss_parts(draft, batch, hidden, target_hidden) for hidden in passes]
    parts: LossParts = jax.tree.map(lambda *values: sum(values) / len(values), *each)
    loss = sum(weight * getattr(parts, name) for name, weight in weights._asdict().items())
    return jnp.asarray(loss), parts


def _loss_parts(
    draft: Draft, batch: TrainingBatch, hidden: Float[Array, "M D"], target_hidden: Float[Array, "M E"] | None
) -> LossParts:
    logits = draft.logits(hidden[None])[0]
    # Compared with the largest logit instead of its index: XLA's argmax on a CPU runs element by element.
    largest = jax.lax.stop_gradient(logits.max(axis=-1))
    count = jnp.maximum(batch.weights.sum(), 1)

    def mean(values: Float[Array, "M"]) -> Float[Array, ""]:
        return (batch.weights * values).sum() / count

    chosen = jnp.take_along_axis(logits, jnp.maximum(batch.distribution_columns, 0), axis=1)
    logprobs = chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    has_label = batch.labels >= 0  # The label is the first column of the distribution.
    reverse, total_variation = _distances(batch, logprobs)
    hidden_error = jnp.zeros(())
    if target_hidden is not None and reads_target(draft):
        predicted = draft.next_hidden(hidden[None])[0]
        error, size = (
            jnp.square(x.astype(jnp.float32)).mean(axis=-1) for x in (predicted - target_hidden, target_hidden)
        )
        hidden_error = mean(error / jnp.maximum(size, 1e-6))
    return LossParts(
        soft=mean(-(jnp.asarray(batch.distribution_probs) * logprobs).sum(axis=1)),
        hard=mean(jnp.where(has_label, -logprobs[:, 0], 0.0)),
        reverse=mean(reverse),
        total_variation=mean(total_variation),
        hidden=hidden_error,
        agreement=mean(jnp.where(has_label, chosen[:, 0] >= largest, 0.0)),
        num_tokens=batch.weights.sum(),
    )


def _distances(batch: TrainingBatch, logprobs: Float[Array, "M k"]) -> tuple[Float[Array, "M"], Float[Array, "M"]]:
    """Returns the reverse KL divergence and the total variation per position.

    All tokens that are not in the target's stored distribution count as one.
    """
    is_known = batch.distribution_columns >= 0
    target = jnp.asarray(batch.distribution_probs) * batch.distribution_mass[:, None]
    draft = jnp.where(is_known, jnp.exp(logprobs), 0.0)
    target_rest, draft_rest = (jnp.maximum(1 - probs.sum(axis=1), _MIN_PROB) for probs in (target, draft))
    known = jnp.where(is_known, draft * (logprobs - jnp.log(jnp.maximum(target, _MIN_PROB))), 0.0)
    reverse = known.sum(axis=1) + draft_rest * (jnp.log(draft_rest) - jnp.log(target_rest))
    total_variation = (jnp.abs(target - draft).sum(axis=1) + jnp.abs(target_rest - draft_rest)) / 2
    return reverse, total_variation


def _previous(hidden: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
    """Returns the states of the previous positions, zeros at the first position."""
    return jnp.pad(hidden, ((0, 0), (1, 0), (0, 0)))[:, :-1]


@jax.custom_vjp
def _take_rows(x: Float[Array, "P D"], selected: Int[Array, "M"], is_real: Bool[Array, "M"]) -> Float[Array, "M D"]:
    """Gathers rows, each real one at most once, with a gradient that is a gather too.

    XLA's gradient of a gather is a scatter, which runs element by element on a CPU and took a quarter of the training
    step.
    """
    del is_real
    return x[selected]


def _take_rows_forward(x, selected, is_real):
    return x[selected], (jnp.zeros((x.shape[0], 0)), selected, is_real)


def _take_rows_backward(saved, gradient):
    like, selected, is_real = saved
    num_rows = like.shape[0]
    # The rows of padding are sent past the end and dropped.
    destination = jnp.where(is_real, selected, num_rows)
    origin = jnp.full(num_rows, len(selected)).at[destination].set(jnp.arange(len(selected)), mode="drop")
    padded = jnp.pad(gradient, ((0, 1), (0, 0)))
    return padded[origin], None, None


_take_rows.defvjp(_take_rows_forward, _take_rows_backward)
