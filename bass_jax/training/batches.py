"""Training batches: sequences of similar length, in an order that depends on the seed and the epoch only."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bass_jax.training.draft_vocabulary import output_columns, proposed_ids
from bass_jax.training.init_draft import Draft, reads_target
from bass_jax.training.rollout import Rollout
from bass_jax.typing import Array, Float, Int

_MAX_SLOTS_PER_TOKEN = 2.5
"""Maximum of B * T per response token: with long prompts a batch has fewer response tokens than it could hold."""

_EVALUATION_GRAIN = 128
"""Sequences that are evaluated one by one are padded to a multiple of this."""


class TrainingBatch(NamedTuple):
    """The input of one training step, with M response tokens and the k most probable tokens of the target for each."""

    tokens: Int[np.ndarray, "B T"]  # int32, prompt and response without the last token
    lengths: Int[np.ndarray, "B"]  # int32, tokens of each row; 0 for a padding row
    selected: Int[np.ndarray, "M"]  # int32, position in [B * T] whose output predicts the response token
    weights: Float[np.ndarray, "M"]  # float32, 1, or 0 for padding
    distribution_columns: Int[np.ndarray, "M k"]  # int32, output columns of the most probable tokens, -1 for no column
    distribution_probs: Float[np.ndarray, "M k"]  # float32, renormalized over those with a column; 0 if there are none
    labels: Int[np.ndarray, "M"]  # int32, output column of the most probable token, or -1
    distribution_mass: Float[np.ndarray, "M"]  # float32, probability of the tokens with a column, not renormalized
    hidden: Float[Array | np.ndarray, "B T E"] | None = None  # the target's hidden states, if the draft reads them


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
) -> Iterator[TrainingBatch]:
    """Yields every rollout once.

    Args:
        rollouts: of the epoch, each with at most `batch_tokens` response tokens.
        columns: ``[V]``, output column of every token; see `output_columns`.
        batch_tokens: M.
        length_grain: sequences are padded to a multiple of this.
        seed: of the order.
        skip: leave out this many batches without making them.
        row_grain: the number of rows is padded to a multiple of this.
        reads_hidden: the draft reads the target's hidden states; every rollout has them.
    """
    num_rows = _rows_per_length(rollouts, batch_tokens, length_grain)
    groups = _groups(rollouts, num_rows, batch_tokens, length_grain, seed)
    for length, rows in itertools.islice(groups, skip, None):
        padded_rows = -(-num_rows[length] // row_grain) * row_grain
        yield make_batch(rows, columns, length, batch_tokens, padded_rows, reads_hidden)


def _groups(
    rollouts: Sequence[Rollout],
    num_rows: Mapping[int, int],
    batch_tokens: int,
    length_grain: int,
    seed: tuple[int, ...],
) -> Iterator[tuple[int, list[Rollout]]]:
    """Yields the rows of each batch with their padded length, in random order."""
    open_batches: dict[int, list[Rollout]] = {}
    for index in np.random.default_rng(seed).permutation(len(rollouts)):
        rollout = rollouts[index]
        length = _padded_length(rollout, length_grain)
        rows = open_batches.setdefault(length, [])
        num_tokens = sum(len(row.response) for row in rows) + len(rollout.response)
        if rows and (len(rows) == num_rows[length] or num_tokens > batch_tokens):
            yield length, rows
            rows = open_batches[length] = []
        rows.append(rollout)
    yield from sorted(open_batches.items())


def _padded_length(rollout: Rollout, grain: int) -> int:
    return -(-(len(rollout.prompt) + len(rollout.response) - 1) // grain) * grain


def _rows_per_length(rollouts: Sequence[Rollout], batch_tokens: int, length_grain: int) -> dict[int, int]:
    """Returns how many rows a batch of each length has: as many as fill it with responses of their mean length.

    More rows would mostly be padding. The number is rounded, so that most shapes stay the same when a corpus grows.
    """
    responses: dict[int, list[int]] = {}
    for rollout in rollouts:
        responses.setdefault(_padded_length(rollout, length_grain), []).append(len(rollout.response))
    found = {}
    for length, lengths in responses.items():
        rows = min(batch_tokens / np.mean(lengths), _MAX_SLOTS_PER_TOKEN * batch_tokens / length)
        grain = max(1, 2 ** int(np.log2(max(rows, 1)) - 2))  # Rounds by at most an eighth.
        found[length] = max(1, round(rows / grain) * grain)
    return found


def make_batch(
    rows: Sequence[Rollout],
    columns: Int[np.ndarray, "V"],
    length: int,
    batch_tokens: int,
    num_rows: int,
    reads_hidden: bool = False,
) -> TrainingBatch:
    """Pads rollouts to ``[num_rows, length]`` and `batch_tokens` response tokens.

    Raises:
        ValueError: if the draft reads hidden states and a rollout has none.
    """
    tokens, lengths = pad_sequences([row.inputs for row in rows], num_rows, length)
    selected, weights = np.zeros(batch_tokens, np.int32), np.zeros(batch_tokens, np.float32)
    top = rows[0].distribution_ids.shape[1]
    ids, logprobs = np.zeros((batch_tokens, top), np.int32), np.full((batch_tokens, top), -np.inf, np.float32)
    start = 0
    for index, row in enumerate(rows):
        count = len(row.response)
        span = slice(start, start + count)
        selected[span] = index * length + len(row.prompt) - 1 + np.arange(count)
        weights[span] = 1
        ids[span], logprobs[span] = row.distribution_ids, row.distribution_logprobs
        start += count
    distribution_columns = columns[ids]
    probs = np.where(distribution_columns >= 0, np.exp(logprobs), 0).astype(np.float32)
    mass = probs.sum(axis=1)
    probs /= np.maximum(mass[:, None], 1e-9)
    hidden = _pad_hidden(rows, num_rows, length) if reads_hidden else None
    labels = distribution_columns[:, 0]
    return TrainingBatch(tokens, lengths, selected, weights, distribution_columns, probs, labels, mass, hidden)


def pad_sequences(
    sequences: Sequence[np.ndarray], num_rows: int, length: int
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B"]]:
    """Pads token sequences on the right; returns tokens ``[num_rows, length]`` and lengths ``[num_rows]``, int32."""
    tokens, lengths = np.zeros((num_rows, length), np.int32), np.zeros(num_rows, np.int32)
    for index, sequence in enumerate(sequences):
        tokens[index, : len(sequence)], lengths[index] = sequence, len(sequence)
    return tokens, lengths


def single_batches(rollouts: Sequence[Rollout], draft: Draft) -> Iterator[TrainingBatch]:
    """Yields one batch per rollout for an evaluation, padded to few shapes."""
    columns = output_columns(proposed_ids(draft), draft.config.vocab_size)
    longest = max(len(rollout.response) for rollout in rollouts)
    for rollout in rollouts:
        length = _padded_length(rollout, _EVALUATION_GRAIN)
        yield make_batch([rollout], columns, length, longest, 1, reads_target(draft))


def _pad_hidden(rows: Sequence[Rollout], num_rows: int, length: int) -> Float[np.ndarray, "B T E"]:
    kept = [row.hidden for row in rows if row.hidden is not None]
    if len(kept) < len(rows):
        raise ValueError(
            "rollouts without the target's hidden states: write the corpus with rollout.keep_hidden_states"
        )
    padded = np.zeros((num_rows, length, kept[0].shape[1]), kept[0].dtype)
    for index, hidden in enumerate(kept):
        padded[index, : len(hidden)] = hidden
    return padded
