"""Builds a retrieval datastore from a target's answers."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bass_jax.checkpoint import load_tokenizer
from bass_jax.checkpoint.datastore_file import write_datastore
from bass_jax.drafters.retrieval import suffix_hashes
from bass_jax.training.agreement import Agreement, agreement_of
from bass_jax.training.corpus import Corpus
from bass_jax.training.data import corpus_rows
from bass_jax.training.distill_config import DistillConfig
from bass_jax.training.evaluate import HELD_OUT, held_out_groups
from bass_jax.training.prompts import prompt_source
from bass_jax.training.rollout import Rollout
from bass_jax.training.write_corpus import target_path
from bass_jax.typing import Float, Int, UInt

_SAME_CONFIDENCE = 32
"""A longer context is left out if it predicts the same token with a confidence that differs by at most this, of 255."""


class DatastoreArrays(NamedTuple):
    """The arrays of a `bass_jax.drafters.RetrievalDrafter`, in NumPy."""

    keys: UInt[np.ndarray, "E"]
    tokens: Int[np.ndarray, "E"] | UInt[np.ndarray, "E"]
    confidence: UInt[np.ndarray, "E"]


class _Contexts(NamedTuple):
    """The distinct contexts of one length in ascending order of their hashes, with the token that each predicts."""

    hashes: np.ndarray  # [c] uint32
    tokens: np.ndarray  # [c] int32
    confidence: np.ndarray  # [c] uint8
    num_seen: np.ndarray  # [c] int64, how often the token followed


class BuiltDatastore(NamedTuple):
    """The result of `distill_datastore`."""

    num_entries: int  # contexts in the file
    num_tokens: int  # response tokens that were counted
    agreements: dict[str, Agreement]  # of the datastore as a drafter, by held-out domain


def distill_datastore(
    config: DistillConfig, path: Path, *, max_ngram: int = 4, min_ngram: int = 1, max_entries: int = 1_600_000
) -> BuiltDatastore:
    """Builds a datastore from the corpus of a distillation, writes it, and evaluates it on the held-out answers.

    Args:
        config: of the distillation; its corpus is written. Answers to held-out prompts are left out as in training.
        path: of the file.
        max_ngram: see `build_datastore`.
        min_ngram: see `build_datastore`.
        max_entries: see `build_datastore`.

    Raises:
        ValueError: as `build_datastore`; if there is no corpus, or it overlaps the held-out prompts.
    """
    tokenizer = load_tokenizer(target_path(config.target))
    rows = corpus_rows(config, prompt_source(config), tokenizer)
    trained = rows.trained(rows.shards())
    lengths = {"max_ngram": max_ngram, "min_ngram": min_ngram}
    arrays = build_datastore(trained, max_entries=max_entries, **lengths)
    num_tokens = sum(len(row.response) for row in trained)
    about = {"target": config.target, "num_rollouts": len(trained), "num_tokens": num_tokens}
    write_datastore(
        path, arrays._asdict(), **lengths, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer, about=about
    )
    agreements = {}
    if (directory := config.corpus_root / HELD_OUT).is_dir():
        for (name, _), answers in held_out_groups(Corpus(directory), is_sampled=False):
            matches = [_matches(arrays, row, lengths) for row in answers]
            agreements[name] = agreement_of(matches, config.draft_len)
    return BuiltDatastore(len(arrays.keys), num_tokens, agreements)


def _matches(arrays: DatastoreArrays, row: Rollout, lengths: dict[str, int]) -> np.ndarray:
    """Returns where the datastore would draft the answer's token."""
    tokens, _ = look_up(arrays, np.concatenate([row.prompt, row.response]), len(row.prompt), **lengths)
    return tokens == row.response


def build_datastore(
    rollouts: Iterable[Rollout], *, max_ngram: int = 4, min_ngram: int = 1, max_entries: int = 1_600_000
) -> DatastoreArrays:
    """Finds the most frequent next token after every context of `min_ngram` to `max_ngram` tokens.

    The target's most probable tokens are counted, which in sampled answers can differ from the sampled ones. A longer
    context is left out if it predicts the same as the shorter one, to which a lookup falls back.

    Args:
        rollouts: of the target.
        max_ngram: longest context.
        min_ngram: shortest context.
        max_entries: maximum number of contexts; the rarest are left out. An entry takes 7 bytes.

    Returns:
        The arrays; ``confidence`` is the share of the context's occurrences that the token followed, times 255, with
        absolute discounting (Ney et al. 1994).

    Raises:
        ValueError: if there are no rollouts, or an option is out of range.
    """
    if not 1 <= min_ngram <= max_ngram:
        raise ValueError(f"min_ngram={min_ngram}: expected 1 to max_ngram={max_ngram}")
    if max_entries < 1:
        raise ValueError(f"max_entries={max_entries}: expected a positive number")
    windows, num_known, tokens = _observations(list(rollouts), max_ngram)
    hashes = np.asarray(suffix_hashes(windows))
    shorter, kept = None, []
    for length in range(min_ngram, max_ngram + 1):
        column = length - 1
        is_whole = num_known >= length
        found, first = _count(hashes[is_whole, column], tokens[is_whole])
        if shorter is None:
            is_kept = np.ones(len(found.hashes), bool)
        else:
            # Each context ends with a shorter one, which was counted too.
            place = np.searchsorted(shorter.hashes, hashes[is_whole, column - 1][first])
            change = np.abs(found.confidence.astype(int) - shorter.confidence[place])
            is_kept = (found.tokens != shorter.tokens[place]) | (change > _SAME_CONFIDENCE)
            found = found._replace(confidence=np.where(is_kept, found.confidence, shorter.confidence[place]))
        shorter = found
        kept.append(_Contexts(*(field[is_kept] for field in found)))
    keys, tokens, confidence, num_seen = (np.concatenate(parts) for parts in zip(*kept, strict=True))
    chosen = np.argsort(-num_seen, kind="stable")[:max_entries]
    # Of two contexts with the same hash the shorter one comes first and is kept.
    keys, unique = np.unique(keys[np.sort(chosen)], return_index=True)
    chosen = np.sort(chosen)[unique]
    tokens = tokens[chosen]
    return DatastoreArrays(
        keys, tokens.astype(np.uint16 if tokens.max() < 1 << 16 else np.int32), confidence[chosen].astype(np.uint8)
    )


def look_up(
    arrays: DatastoreArrays, sequence: Int[np.ndarray, "n"], start: int, max_ngram: int, min_ngram: int
) -> tuple[Int[np.ndarray, "m"], Float[np.ndarray, "m"]]:
    """Returns what the datastore predicts at every position from `start` on, given the tokens before it.

    Args:
        arrays: of the datastore.
        sequence: ``[n]`` tokens.
        start: first position, at least 1.
        max_ngram: longest context.
        min_ngram: shortest context.

    Returns:
        Tokens, -1 where no context is found, and their confidences from 0 to 1.
    """
    positions = np.arange(start, len(sequence))
    hashes = suffix_hashes(_windows(sequence, positions, max_ngram))
    tokens, confidence = np.full(len(positions), -1), np.zeros(len(positions))
    for length in range(min_ngram, max_ngram + 1):
        place = np.minimum(np.searchsorted(arrays.keys, hashes[:, length - 1]), len(arrays.keys) - 1)
        is_hit = (arrays.keys[place] == hashes[:, length - 1]) & (positions >= length)
        tokens = np.where(is_hit, arrays.tokens[place], tokens)
        confidence = np.where(is_hit, arrays.confidence[place] / 255, confidence)
    return tokens, confidence


def _observations(rollouts: Sequence[Rollout], size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns, per response position, the tokens before it ``[m, size]``, their number and the most probable token."""
    if not rollouts:
        raise ValueError("rollouts: there is nothing to count")
    windows, num_known = [], []
    for rollout in rollouts:
        sequence = np.concatenate([rollout.prompt, rollout.response])
        positions = np.arange(len(rollout.prompt), len(sequence))
        windows.append(_windows(sequence, positions, size))
        num_known.append(positions)
    most_probable = np.concatenate([row.distribution_ids[:, 0] for row in rollouts])
    return np.concatenate(windows), np.concatenate(num_known), most_probable


def _windows(sequence: np.ndarray, positions: np.ndarray, size: int) -> np.ndarray:
    """Returns the `size` tokens before every position, 0 before the start of the sequence."""
    padded = np.concatenate([np.zeros(size, sequence.dtype), sequence])
    return np.lib.stride_tricks.sliding_window_view(padded, size)[positions]


def _count(hashes: np.ndarray, tokens: np.ndarray) -> tuple[_Contexts, np.ndarray]:
    """Returns the most frequent token of every distinct hash, and an index into `hashes` where each occurs."""
    pairs, first, num_seen = np.unique(
        hashes.astype(np.uint64) << np.uint64(32) | tokens.astype(np.uint64), return_index=True, return_counts=True
    )
    # The most frequent token of a hash comes first, the lower one of equals.
    order = np.lexsort((-num_seen, pairs >> np.uint64(32)))
    distinct, best = np.unique(pairs[order] >> np.uint64(32), return_index=True)
    total = np.add.reduceat(num_seen[order], best)
    once, twice = (num_seen == 1).sum(), (num_seen == 2).sum()
    discount = once / max(once + 2 * twice, 1)
    chosen = order[best]
    confidence = np.round(255 * np.maximum(num_seen[chosen] - discount, 0) / total)
    most_frequent = (pairs[chosen] & np.uint64(0xFFFFFFFF)).astype(np.int32)
    contexts = _Contexts(distinct.astype(np.uint32), most_frequent, confidence.astype(np.uint8), num_seen[chosen])
    return contexts, first[chosen]
