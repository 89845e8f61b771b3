"""How much of a draft's distribution its target accepts, where answers are sampled."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.models import Model
from bass_jax.training.batches import Batch, single_batches
from bass_jax.training.draft_vocabulary import proposed_ids
from bass_jax.training.loss import scored_logits
from bass_jax.training.rollout import Rollout
from bass_jax.typing import Array, Float, Int


def measure_acceptance(draft: Model, target: Model, rollouts: Sequence[Rollout]) -> float:
    """Returns the mean of ``sum_x min(p(x), q(x))`` over the positions of sampled answers.

    That is the probability that the rule of Leviathan et al. (2023) accepts a draft there; p and q are the target's and
    the draft's whole distributions at the temperature that an answer was sampled at, given what precedes.

    Args:
        draft: see above.
        target: see above.
        rollouts: of the target, at temperatures above 0.

    Raises:
        ValueError: if there is no rollout, or one is greedy.
    """
    if not rollouts or any(not rollout.temperature > 0 for rollout in rollouts):
        raise ValueError("rollouts: expected sampled ones, at least one")
    ids = jnp.asarray(proposed_ids(draft))
    total, num = 0.0, 0
    for rollout, batch in zip(rollouts, single_batches(rollouts, draft), strict=True):
        kept = _kept(draft, target, batch, ids, jnp.float32(rollout.temperature))
        total += float(np.asarray(kept)[: len(rollout.response)].sum())
        num += len(rollout.response)
    return total / num


@jax.jit
def _kept(
    draft: Model, target: Model, batch: Batch, ids: Int[Array, "O"], temperature: Float[Array, ""]
) -> Float[Array, "M"]:
    """Of each response position, the mass that both distributions share."""
    p, q = (
        jax.nn.softmax(scored_logits(model.config, model.params, batch) / temperature, axis=-1)
        for model in (target, draft)
    )
    return jnp.minimum(p[:, ids], q).sum(axis=-1)
