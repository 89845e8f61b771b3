"""Computes the logits of whole texts in cached passes of the sizes that speculation uses."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.models import Model

NUM_AFTER_PREFILL, NUM_VERIFIED = 12, 5


@jax.jit
def _forward(model: Model, tokens, positions, cache, num_kept):
    output = model.forward(tokens, positions, cache)
    return output.logits, model.commit(output.cache, num_kept)


def read_texts(model: Model, texts: Sequence[Sequence[int]], capacity: int = 64) -> list[np.ndarray]:
    """Returns the logits of every position of each text, ``[n, V]`` float32.

    Prefills all but the last 12 tokens of the texts as one ragged batch, then runs passes of 1, 1, 5 and 5 tokens.
    Before the last two passes, a pass over five wrong tokens is rolled back. A pass of one token has four tokens of
    padding, as a verification of no drafts has, so that two functions are compiled per model.
    """
    cache = model.init_cache(len(texts), capacity)
    scores = [[] for _ in texts]
    starts = np.zeros(len(texts), np.int32)

    def read(counts, *, is_kept=True):
        nonlocal cache, starts
        width = max(*counts, NUM_VERIFIED)
        tokens = np.full((len(texts), width), -1, np.int32)
        positions = np.full((len(texts), width), capacity, np.int32)
        for row, (text, start, count) in enumerate(zip(texts, starts, counts, strict=True)):
            new = np.asarray(text[start : start + count])
            tokens[row, :count] = new if is_kept else (new + 1) % model.config.vocab_size
            positions[row, :count] = start + np.arange(count)
        num_kept = jnp.asarray(counts if is_kept else np.zeros(len(texts)), jnp.int32)
        logits, cache = _forward(model, jnp.asarray(tokens), jnp.asarray(positions), cache, num_kept)
        if is_kept:
            for row, count in enumerate(counts):
                scores[row].append(np.asarray(logits[row, :count]))
            starts = starts + np.asarray(counts, np.int32)

    read([len(text) - NUM_AFTER_PREFILL for text in texts])
    ones, fives = [1] * len(texts), [NUM_VERIFIED] * len(texts)
    read(ones)
    read(ones)
    read(fives, is_kept=False)
    read(fives)
    read(fives)
    return [np.concatenate(score) for score in scores]


def tolerance_of(model: Model) -> float:
    """Returns the largest relative error of float32 logits whose sums have another order.

    The values are for up to 30 layers; a wrong model has errors above 1e-2. Recurrent layers normalize keys that may be
    small: logits of the models here differ by up to 7e-5 from those in float64, and those of `transformers` in float32
    by up to 2.1e-4.
    """
    return 1e-4 if model.is_recurrent else 2e-5


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest difference divided by the largest logit, or by 1 if all logits are 0."""
    return float(np.abs(found - expected).max() / (np.abs(expected).max() or 1.0))
