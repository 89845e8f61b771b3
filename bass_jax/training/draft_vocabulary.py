"""The output vocabulary of a draft: the most frequent tokens of its target."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from bass_jax.typing import Int

_PROMPT_WEIGHT = 0.3


def choose_output_ids(
    responses: Iterable[np.ndarray],
    prompts: Iterable[np.ndarray],
    *,
    vocab_size: int,
    size: int,
    always: Iterable[int] = (),
) -> Int[np.ndarray, "O"]:
    """Returns the most frequent tokens.

    Args:
        responses: token ids of the target's answers.
        prompts: token ids of all prompts, answered or not. They have a smaller weight, because answers repeat them in
            part.
        vocab_size: V.
        size: O.
        always: tokens that are included in any case, such as bytes and special tokens.

    Returns:
        ``[O]`` int32 in ascending order.

    Raises:
        ValueError: if `size` is larger than the vocabulary or smaller than `always`.
    """
    forced = sorted(set(always))
    if not len(forced) <= size <= vocab_size:
        raise ValueError(
            f"output_vocab_size={size}: expected {len(forced)} (bytes and specials) to {vocab_size} (vocabulary)"
        )
    counts = _shares(responses, vocab_size) + _PROMPT_WEIGHT * _shares(prompts, vocab_size)
    counts[forced] = np.inf
    # Stable: of equal counts the lower id comes first. Byte-pair merges with lower ids are more common.
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def output_columns(output_ids: Int[np.ndarray, "O"], vocab_size: int) -> Int[np.ndarray, "V"]:
    """Returns the column of every token in the draft's head, -1 for tokens without one."""
    columns = np.full(vocab_size, -1, np.int32)
    columns[output_ids] = np.arange(len(output_ids), dtype=np.int32)
    return columns


def proposed_ids(draft: Any) -> Int[np.ndarray, "O"]:
    """Returns the token of every column of the draft's head."""
    return np.arange(draft.config.vocab_size) if draft.output_ids is None else np.asarray(draft.output_ids)


def _shares(sequences: Iterable[np.ndarray], vocab_size: int) -> np.ndarray:
    counts = np.zeros(vocab_size)
    for sequence in sequences:
        counts += np.bincount(sequence, minlength=vocab_size)
    return counts / max(counts.sum(), 1)
