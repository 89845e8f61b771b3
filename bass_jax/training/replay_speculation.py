"""Greedy speculation along given answers: measures any drafter without running the target."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.acceptance.base import leading_run
from bass_jax.decoding.positions import input_positions
from bass_jax.drafters import DraftContext, Drafter, borrows_cache, reads_hidden_states
from bass_jax.sampling import LogitsProcessors, SamplingParams
from bass_jax.training.batches import pad_sequences
from bass_jax.training.rollout import Rollout
from bass_jax.typing import Array

_CAPACITY_GRAIN = 256


class Speculation(NamedTuple):
    """The counts of a drafter on its target's greedy answers."""

    num_tokens: int  # of the answers
    num_passes: int  # of the target
    num_drafted: int
    num_accepted: int

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens per target pass at temperature 0."""
        return self.num_tokens / self.num_passes


def speculate_on(drafter: Drafter, rollouts: Sequence[Rollout], draft_len: int, *, batch: int = 8) -> Speculation:
    """Drafts along `rollouts` as if the target wrote them now.

    At temperature 0 the target writes the same answer with every drafter, so the counts are those of speculation.

    Args:
        drafter: of any kind.
        rollouts: greedy; with the hidden states of the target that the drafter reads; see
            `bass_jax.training.rollout.with_hidden`.
        draft_len: G, the maximum.
        batch: rows at a time.

    Raises:
        ValueError: if there is no rollout, one was sampled, the drafter uses the target's cache, or the hidden states
            that it reads are missing.
    """
    if borrows_cache(drafter):
        raise ValueError(f"drafter={type(drafter).__name__}: expected one without the target's cache, which is not run")
    if any(rollout.temperature > 0 for rollout in rollouts) or not rollouts:
        raise ValueError("rollouts: expected greedy ones, at least one")
    if reads_hidden_states(drafter) and any(rollout.hidden is None for rollout in rollouts):
        raise ValueError(
            "rollouts: the drafter reads the target's hidden states; write them with rollout.keep_hidden_states"
        )
    total = np.zeros(4, np.int64)
    ordered = sorted(rollouts, key=lambda rollout: len(rollout.prompt) + len(rollout.response))
    for start in range(0, len(ordered), batch):
        total += np.asarray(_run(drafter, *_pad(ordered[start : start + batch], batch, drafter), draft_len))
    return Speculation(*map(int, total))


def _pad(rows: Sequence[Rollout], num_rows: int, drafter: Drafter) -> tuple:
    """Returns tokens, prompt lengths, total lengths and hidden states; padding rows have both lengths 1."""
    sequences = [np.concatenate([row.prompt, row.response]) for row in rows]
    capacity = -(-max(map(len, sequences)) // _CAPACITY_GRAIN) * _CAPACITY_GRAIN
    tokens, ends = pad_sequences(sequences, num_rows, capacity)
    lengths = np.ones(num_rows, np.int32)
    lengths[: len(rows)] = [len(row.prompt) for row in rows]
    hidden = None
    if reads_hidden_states(drafter):
        assert rows[0].hidden is not None
        hidden = np.zeros((num_rows, capacity, rows[0].hidden.shape[1]), np.float32)
        for index, row in enumerate(rows):
            hidden[index, : len(sequences[index]) - 1] = row.hidden
    return tokens, lengths, np.maximum(ends, 1), hidden


@functools.partial(jax.jit, static_argnums=5)
def _run(drafter, tokens, lengths, ends, hidden, draft_len: int) -> Array:
    """Returns the numbers of tokens, passes, drafts and accepted drafts of all rows."""
    num_rows, capacity = tokens.shape
    rows, slots = jnp.arange(num_rows)[:, None], jnp.arange(draft_len)
    if hidden is None:
        state = drafter.init(tokens, lengths)
    else:  # The target has read the prompt without its last token.
        is_read = jnp.arange(capacity) < lengths[:, None] - 1
        state = drafter.init(tokens, lengths, jnp.where(is_read[..., None], hidden, 0))
    sampling_arrays = SamplingParams().sampling_arrays(num_rows, 1)
    processors = LogitsProcessors(None, lengths, jnp.full((num_rows, 1), -1))
    keys = jnp.broadcast_to(jax.random.key(0), (num_rows, draft_len))

    def advance(carry):
        lengths, state, counts = carry
        is_active = lengths < ends
        num_wanted = jnp.where(is_active, jnp.clip(ends - lengths - 1, 0, draft_len), 0)
        context = DraftContext(tokens, lengths, num_wanted, sampling_arrays, keys, processors)
        proposal, state = drafter.propose(state, context, draft_len, is_sampled=False)
        answer = tokens[rows, jnp.minimum(lengths[:, None] + slots, capacity - 1)]
        num_drafted = jnp.minimum(proposal.num_drafted, num_wanted)
        num_accepted = leading_run(proposal.tokens == answer, num_drafted)
        num_emitted = jnp.where(is_active, num_accepted + 1, 0)
        if hidden is not None:
            num_inputs = jnp.where(is_active, num_drafted + 1, 0)
            positions = input_positions(lengths, draft_len + 1, num_inputs, capacity)
            state = drafter.observe(state, hidden[rows, jnp.minimum(positions, capacity - 1)], positions)
        lengths = lengths + num_emitted
        counted = jnp.stack([num_emitted.sum(), is_active.sum(), num_drafted.sum(), num_accepted.sum()])
        return lengths, drafter.commit(state, lengths), counts + counted.astype(jnp.int32)

    start = (lengths, state, jnp.zeros(4, jnp.int32))
    return jax.lax.while_loop(lambda carry: (carry[0] < ends).any(), advance, start)[2]
