"""Batches of sequences of similar length, in an order that depends on the seed and the epoch alone."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bass_jax.models import Model
from bass_jax.training.draft_vocabulary import output_columns, proposed_ids
from bass_jax.training.rollout import Rollout
from bass_jax.typing import Float, Int

_MOST_PER_TOKEN = 2.5
"""Rows of a batch, times its length, per response token, at most: longer prompts leave room for responses unused."""

_EVALUATED_GRAIN = 128
"""Lengths of sequences that are evaluated one by one are rounded up to multiples of this."""


class Batch(NamedTuple):
    """What one optimizer step reads. M response tokens, k tokens of the distribution.

    Attributes:
        tokens: ``[B, T]`` int32: prompt and response, without the last token.
        lengths: ``[B]`` int32: real tokens of each row; 0 for a row that is not used.
        selected: ``[M]`` int32: place in ``[B * T]`` whose output predicts the response token.
        weights: ``[M]`` float32: 1, or 0 for padding.
        distribution_columns: ``[M, k]`` int32: output columns of the target's most probable tokens, -1 outside.
        distribution_probs: ``[M, k]`` float32: their probabilities, renormalized over those inside; all 0 if none is.
        labels: ``[M]`` int32: output column of the target's most probable token, -1 outside.
        distribution_mass: ``[M]`` float32: probability of the distribution inside, before it is renormalized.
        hidden: ``[B, T, E]`` float16: the target's hidden states at every token; None for drafts that read tokens
            alone.
    """

    tokens: Int[np.ndarray, "B T"]
    lengths: Int[np.ndarray, "B"]
    selected: Int[np.ndarray, "M"]
    weights: Float[np.ndarray, "M"]
    distribution_columns: Int[np.ndarray, "M k"]
    distribution_probs: Float[np.ndarray, "M k"]
    labels: Int[np.ndarray, "M"]
    distribution_mass: Float[np.ndarray, "M"]
    hidden: Float[np.ndarray, "B T E"] | None = None


def epoch_batches(
    rollouts: Sequence[Rollout],
    columns: Int[np.ndarray, "V"],
    *,
    batch_tokens: int,
    length_grain: int,
    seed: tuple[int, ...],
    skip: int = 0,
    row_grain: int = 1,
    reads_hidden: bool = False,
) -> Iterator[Batch]:
    """Yields every rollout once.

    Args:
        rollouts: of the epoch, each of at most `batch_tokens` response tokens.
        columns: output column of every token; see `vocabulary.output_columns`.
        batch_tokens: M.
        length_grain: lengths are rounded up to multiples of this.
        seed: of the order.
        skip: leave out this many batches, without making them.
        row_grain: rows of a batch are padded to a multiple of this.
        reads_hidden: the draft reads the target's hidden states, which every rollout has.
    """
    most = _rows_of_buckets(rollouts, batch_tokens, length_grain)
    groups = _groups(rollouts, most, batch_tokens, length_grain, seed)
    for bucket, rows in itertools.islice(groups, skip, None):
        num_rows = -(-most[bucket] // row_grain) * row_grain
        yield make_batch(rows, columns, bucket, batch_tokens, num_rows, reads_hidden)


def _groups(rollouts, most, batch_tokens, length_grain, seed) -> Iterator[tuple[int, list[Rollout]]]:
    open_batches: dict[int, list[Rollout]] = {}
    for index in np.random.default_rng(seed).permutation(len(rollouts)):
        rollout = rollouts[index]
        bucket = _bucket(rollout, length_grain)
        rows = open_batches.setdefault(bucket, [])
        if rows and (
            len(rows) == most[bucket] or sum(len(row.response) for row in rows) + len(rollout.response) > batch_tokens
        ):
            yield bucket, rows
            rows = open_batches[bucket] = []
        rows.append(rollout)
    yield from sorted(open_batches.items())


def _bucket(rollout: Rollout, length_grain: int) -> int:
    length = len(rollout.prompt) + len(rollout.response) - 1
    return -(-length // length_grain) * length_grain


def _rows_of_buckets(rollouts: Sequence[Rollout], batch_tokens: int, length_grain: int) -> dict[int, int]:
    """Returns the rows of a batch, by length: as many as responses of that length's mean fill it.

    A row more would seldom be used, and be computed all the same. Rounded: a corpus that grows keeps most shapes.
    """
    responses: dict[int, list[int]] = {}
    for rollout in rollouts:
        responses.setdefault(_bucket(rollout, length_grain), []).append(len(rollout.response))
    found = {}
    for bucket, lengths in responses.items():
        rows = min(batch_tokens / np.mean(lengths), _MOST_PER_TOKEN * batch_tokens / bucket)
        grain = max(1, 2 ** int(np.log2(max(rows, 1)) - 2))  # Steps of an eighth to a quarter.
        found[bucket] = max(1, round(rows / grain) * grain)
    return found


def make_batch(
    rows: Sequence[Rollout],
    columns: Int[np.ndarray, "V"],
    length: int,
    batch_tokens: int,
    num_rows: int,
    reads_hidden: bool = False,
) -> Batch:
    """Lays rollouts out, padded to ``[num_rows, length]`` and `batch_tokens` response tokens."""
    batch, top = num_rows, rows[0].distribution_ids.shape[1]
    tokens, lengths = np.zeros((batch, length), np.int32), np.zeros(batch, np.int32)
    selected, weights = np.zeros(batch_tokens, np.int32), np.zeros(batch_tokens, np.float32)
    distribution_ids = np.zeros((batch_tokens, top), np.int32)
    distribution_logprobs = np.full((batch_tokens, top), -np.inf, np.float32)
    filled = 0
    for index, row in enumerate(rows):
        sequence = np.concatenate([row.prompt, row.response[:-1]])
        count = len(row.response)
        tokens[index, : len(sequence)], lengths[index] = sequence, len(sequence)
        span = slice(filled, filled + count)
        selected[span] = index * length + len(row.prompt) - 1 + np.arange(count)
        weights[span] = 1
        distribution_ids[span], distribution_logprobs[span] = row.distribution_ids, row.distribution_logprobs
        filled += count
    distribution_columns = columns[distribution_ids]
    distribution_probs = np.where(distribution_columns >= 0, np.exp(distribution_logprobs), 0).astype(np.float32)
    distribution_mass = distribution_probs.sum(axis=1)
    distribution_probs /= np.maximum(distribution_mass[:, None], 1e-9)
    hidden = _hidden(rows, num_rows, length) if reads_hidden else None
    return Batch(
        tokens,
        lengths,
        selected,
        weights,
        distribution_columns,
        distribution_probs,
        distribution_columns[:, 0],
        distribution_mass,
        hidden,
    )


def single_batches(rollouts: Sequence[Rollout], draft: Model) -> Iterator[Batch]:
    """Yields a batch per rollout, padded to few shapes: an evaluation has hundreds of rows, not millions."""
    columns = output_columns(proposed_ids(draft), draft.config.vocab_size)
    longest = max(len(rollout.response) for rollout in rollouts)
    for rollout in rollouts:
        length = len(rollout.prompt) + len(rollout.response) - 1
        padded = -(-length // _EVALUATED_GRAIN) * _EVALUATED_GRAIN
        yield make_batch([rollout], columns, padded, longest, 1, draft.config.hidden_width is not None)


def _hidden(rows: Sequence[Rollout], num_rows: int, length: int) -> Float[np.ndarray, "B T E"]:
    """Lays the target's hidden states out."""
    kept = [row.hidden_states for row in rows if row.hidden_states is not None]
    if len(kept) < len(rows):
        raise ValueError("rollouts without the target's hidden states: write the corpus with rollout.keep_features")
    hidden = np.zeros((num_rows, length, kept[0].shape[1]), np.float16)
    for index, hidden_states in enumerate(kept):
        hidden[index, : len(hidden_states)] = hidden_states
    return hidden
